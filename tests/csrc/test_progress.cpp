// The order of a group's operations, and what their ends set off.
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <thread>
#include <vector>

#include "comm/progress.hpp"

namespace dpt {
namespace {

using namespace std::chrono_literals;

TEST(Progress, RunsOperationsOneAtATimeInOrder) {
  std::vector<int> order;  // of one operation at a time, so nothing else guards it
  std::vector<int> completed;
  {
    Progress progress;
    for (int i = 0; i < 500; ++i) {
      progress.enqueue([&order, i] { order.push_back(i); },
                       [&completed, i] { completed.push_back(i); });
    }
  }
  ASSERT_EQ(order.size(), 500U);
  for (int i = 0; i < 500; ++i) EXPECT_EQ(order[i], i);
  EXPECT_EQ(completed, order);
}

// Each completion starts an operation and waits for that one's completion, as deep as asked.
void start_chain(Progress& progress, int depth, std::promise<void>& end) {
  progress.enqueue([] {},
                   [&progress, &end, depth] {
                     if (depth == 0) return end.set_value();
                     std::promise<void> next;
                     start_chain(progress, depth - 1, next);
                     next.get_future().wait();
                     end.set_value();
                   });
}

TEST(Progress, ACompletionMayWaitForFurtherOperations) {
  Progress progress;
  for (int round = 0; round < 20; ++round) {
    std::promise<void> end;
    start_chain(progress, 5, end);
    ASSERT_EQ(end.get_future().wait_for(30s), std::future_status::ready);
  }
}

TEST(Progress, ACompletionMayWaitForWhatIsQueuedLater) {
  Progress progress;
  std::promise<void> first;
  std::promise<void> second;
  std::future<void> waits = second.get_future();
  progress.enqueue([] {},
                   [&] {
                     waits.wait();
                     first.set_value();
                   });
  std::this_thread::sleep_for(1ms);
  progress.enqueue([] {}, [&] { second.set_value(); });
  ASSERT_EQ(first.get_future().wait_for(30s), std::future_status::ready);
}

TEST(Progress, ACompletionMayRunAnOperationItself) {
  Progress progress;
  std::promise<bool> ran;
  progress.enqueue([] {},
                   [&] {
                     bool inline_now = false;
                     while (!progress.try_run_inline([&] { inline_now = true; }))
                       progress.drain(1ms);
                     ran.set_value(inline_now);
                   });
  std::future<bool> result = ran.get_future();
  ASSERT_EQ(result.wait_for(30s), std::future_status::ready);
  EXPECT_TRUE(result.get());
}

}  // namespace
}  // namespace dpt
