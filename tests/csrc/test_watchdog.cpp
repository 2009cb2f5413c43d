// Tests of who is dead, who only looks like it, and what a timeout says of either.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bootstrap/exchange.hpp"
#include "comm/watchdog.hpp"
#include "rank_threads.hpp"
#include "transport/shm/segment.hpp"

namespace dpt::testing {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// A process that sleeps until it is killed, and its mark.
class Sleeper {
 public:
  Sleeper() {
    int ends[2];
    DPT_CHECK(pipe(ends) == 0);
    pid_ = fork();
    if (pid_ == 0) {
      const std::string mark = own_process_mark();
      if (write(ends[1], mark.data(), mark.size()) > 0) pause();
      _exit(1);
    }
    char text[256];
    const ssize_t length = read(ends[0], text, sizeof text);
    DPT_CHECK(length > 0);
    mark_.assign(text, length);
    close(ends[0]);
    close(ends[1]);
  }
  ~Sleeper() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  pid_t pid() const { return pid_; }
  const std::string& mark() const { return mark_; }

 private:
  pid_t pid_;
  std::string mark_;
};

// The watchdog's thread tells this, and the test's waits for it.
struct Told {
  std::mutex mutex;
  std::condition_variable changed;
  int ticks = 0;
  std::vector<std::string> dead;

  void tick() {
    std::lock_guard lock(mutex);
    ++ticks;
    changed.notify_all();
  }
  void death(const std::string& process) {
    std::lock_guard lock(mutex);
    dead.push_back(process);
    changed.notify_all();
  }
  void wait_for_ticks(int more) {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this, target = ticks + more] { return ticks >= target; });
  }
  std::vector<std::string> wait_for_a_death() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return !dead.empty(); });
    return dead;
  }
  std::vector<std::string> deaths_so_far() {
    std::lock_guard lock(mutex);
    return dead;
  }
};

TEST(Watchdog, WithoutPidfdsLearnsOfDeathsAndNotOfStops) {
  Sleeper stopped;
  Sleeper killed;
  Told told;
  Watchdog watchdog([&](const std::string& process) { told.death(process); }, [&] { told.tick(); });
  watchdog.watch("stopped", {}, stopped.mark());
  watchdog.watch("killed", {}, killed.mark());
  kill(stopped.pid(), SIGSTOP);
  told.wait_for_ticks(3);
  EXPECT_TRUE(told.deaths_so_far().empty());
  kill(killed.pid(), SIGKILL);
  EXPECT_EQ(told.wait_for_a_death(), std::vector<std::string>{"killed"});
  watchdog.forget("stopped");
}

WaitContext within(std::chrono::milliseconds timeout) {
  return {Deadline(timeout), [] { return std::string("barrier #1"); }, nullptr};
}

std::string timeout_of(Segment& segment, std::chrono::milliseconds timeout) {
  try {
    segment.barrier(within(timeout), WaitStyle::kBackground);
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), DPT_ERR_TIMEOUT);
    return error.what();
  }
  return "no timeout";
}

TEST(Heartbeat, TellsARankThatIsLateFromOneThatIsStopped) {
  const std::vector<int64_t> ranks = {10, 11};
  const int fd = Segment::create_file(2, Segment::kMinChunkBytes);
  Segment waiting(dup(fd), 0, ranks);
  Segment late(fd, 1, ranks);
  late.beat();
  EXPECT_THAT(timeout_of(waiting, std::chrono::milliseconds(1)),
              AllOf(HasSubstr("rank(s) 11 did not come, though alive"),
                    HasSubstr("timed out after 1 ms"),
                    Not(HasSubstr("stopped"))));
}

TEST(Heartbeat, SaysHowLongARankHasBeenSilent) {
  const std::vector<int64_t> ranks = {10, 11};
  const int fd = Segment::create_file(2, Segment::kMinChunkBytes);
  Segment waiting(dup(fd), 0, ranks);
  const Segment stopped(fd, 1, ranks);  // nobody beats for it
  std::this_thread::sleep_for(std::chrono::milliseconds(1300));
  waiting.beat();
  waiting.beat();
  EXPECT_THAT(timeout_of(waiting, std::chrono::milliseconds(1)),
              AllOf(ContainsRegex("rank\\(s\\) 11 \\(for [1-9][0-9]* s\\) did not come"),
                    HasSubstr("no sign of life"),
                    HasSubstr("stopped or frozen?")));
  EXPECT_GE(waiting.silent_for(1), std::chrono::milliseconds(1300));
}

TEST(Heartbeat, NobodyIsAccusedOfAMachineThatStoodStill) {
  const std::vector<int64_t> ranks = {10, 11};
  const int fd = Segment::create_file(2, Segment::kMinChunkBytes);
  Segment waiting(dup(fd), 0, ranks);
  Segment late(fd, 1, ranks);
  std::this_thread::sleep_for(std::chrono::milliseconds(1300));
  waiting.beat();  // its watchdog was the first to go on
  EXPECT_THAT(timeout_of(waiting, std::chrono::milliseconds(1)),
              HasSubstr("rank(s) 11 did not come, though alive"));
}

TEST(Heartbeat, ARankThatWaitsForAnotherNodeSaysItself) {
  const int fd = Segment::create_file(2, Segment::kMinChunkBytes);
  Segment waiting(dup(fd), 0, {10, 11});
  Segment rail(fd, 1, {10, 11});
  rail.set_waits_elsewhere(true);
  std::thread told([&rail] {
    std::this_thread::sleep_for(std::chrono::milliseconds(150));
    rail.abort(DPT_ERR_TIMEOUT, "rank 12 sent nothing");
  });
  std::string text = "no error";
  try {
    waiting.barrier(within(std::chrono::milliseconds(1)), WaitStyle::kBackground);
  } catch (const Error& error) {
    text = error.what();
  }
  told.join();
  EXPECT_THAT(text, AllOf(HasSubstr("rank 12 sent nothing"), Not(HasSubstr("did not come"))));
}

TEST(Heartbeat, ARankThatWaitsForAnotherNodeAndSaysNothingIsNamed) {
  const int fd = Segment::create_file(2, Segment::kMinChunkBytes);
  Segment waiting(dup(fd), 0, {10, 11});
  Segment rail(fd, 1, {10, 11});
  rail.beat();
  rail.set_waits_elsewhere(true);
  EXPECT_THAT(timeout_of(waiting, std::chrono::milliseconds(1)),
              HasSubstr("rank(s) 11 did not come, though alive"));
}

TEST(Heartbeat, OfABusyRankIsTheWatchdogsWork) {
  // Rank 1 does something else for longer than silence is taken for a sign.
  std::promise<void> over;
  run_ranks(2, [&](Rank& rank) {
    rank.barrier();
    if (rank.rank() == 1) return over.get_future().wait();
    const Failure failure = failure_of([&] { rank.barrier(1500); });
    over.set_value();
    EXPECT_THAT(failure.what(), HasSubstr("rank(s) 1 did not come, though alive"));
  });
}

}  // namespace
}  // namespace dpt::testing
