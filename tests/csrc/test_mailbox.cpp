// A pair's mailbox whose rings are full, and message exchanges that are moved by hand: one rank
// stands still while the other goes on.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <numeric>

#include "base/unique_fd.hpp"
#include "comm/message_exchange.hpp"
#include "transport/shm/mailbox.hpp"
#include "transport/shm/memory_pool.hpp"

namespace dpt::testing {
namespace {

using ::testing::HasSubstr;

// More than the mailbox has room for replies to.
constexpr int kMany = 200;
constexpr size_t kCount = Mailbox::kMostInside / sizeof(int32_t) + 1;

class Area {
 public:
  explicit Area(int size) : memory_(std::aligned_alloc(4096, bytes(size))) {
    std::memset(memory_, 0, bytes(size));
  }
  ~Area() { std::free(memory_); }
  Area(const Area&) = delete;
  Area& operator=(const Area&) = delete;
  char* get() const { return static_cast<char*>(memory_); }

 private:
  static size_t bytes(int size) { return Mailbox::area_bytes(size); }
  void* memory_;
};

TEST(Mailbox, SaysWhenWhoFoundNoRoomMustBeRung) {
  const Area area(2);
  Mailbox mailbox(area.get(), 0, 1, 2);
  uint64_t given = 0;
  while (mailbox.reply({.number = given})) ++given;
  Reply reply{};
  bool ring = false;
  for (uint64_t taken = 0; taken < given; ++taken) {
    ASSERT_TRUE(mailbox.take(&reply, &ring));
    EXPECT_EQ(reply.number, taken);
    EXPECT_EQ(ring, taken == 0);
  }
  EXPECT_FALSE(mailbox.take(&reply, &ring));

  uint64_t posted = 0;
  while (mailbox.post({.number = posted, .inside = 0}, nullptr)) ++posted;
  for (uint64_t taken = 0; taken < posted; ++taken) {
    ASSERT_NE(mailbox.front(), nullptr);
    EXPECT_EQ(mailbox.front()->number, taken);
    EXPECT_EQ(mailbox.pop(), taken == 0);
  }
  EXPECT_EQ(mailbox.front(), nullptr);
}

// Two ranks of one process, nobody but the test moving their messages.
class TwoRanks : public ::testing::Test {
 protected:
  struct Side {
    Side(int fd, int rank)
        : segment(fd, rank, {0, 1}),
          exchange(segment, "by hand", [this](const PostPtr& post, std::optional<Error> error) {
            ++ended;
            post->error = std::move(error);
          }) {}

    PostPtr post(bool is_send, std::vector<int32_t>& values, int tag) {
      return post(is_send, values.data(), values.size(), tag);
    }
    PostPtr post(bool is_send, void* data, size_t count, int tag) {
      const int peer = 1 - segment.rank();
      const auto made = std::make_shared<Post>(Post{.is_send = is_send,
                                                    .peer = peer,
                                                    .partner = peer,
                                                    .tag = tag,
                                                    .dtype = DPT_INT32,
                                                    .count = count,
                                                    .input = is_send ? data : nullptr,
                                                    .output = is_send ? nullptr : data,
                                                    .source = nullptr,
                                                    .number = ++posts,
                                                    .deadline = Deadline(std::chrono::hours(1))});
      exchange.post(made);
      return made;
    }
    void move() {
      while (exchange.progress()) {
      }
    }

    Segment segment;
    int ended = 0;
    uint64_t posts = 0;
    MessageExchange exchange;
  };

  TwoRanks() : receiver_(fd_.release(), 1) {
    for (int i = 0; i < kMany; ++i) {
      sent_.emplace_back(kCount);
      std::iota(sent_[i].begin(), sent_[i].end(), i);
      received_.emplace_back(kCount);
    }
  }

  void move_both() {
    for (int before = -1; before != sender_.ended + receiver_.ended;) {
      before = sender_.ended + receiver_.ended;
      sender_.move();
      receiver_.move();
    }
  }

  UniqueFd fd_{Segment::create_file(2, Segment::kMaxChunkBytes)};
  Side sender_{fcntl(fd_.get(), F_DUPFD_CLOEXEC, 0), 0};
  Side receiver_;
  std::vector<std::vector<int32_t>> sent_;
  std::vector<std::vector<int32_t>> received_;
};

TEST_F(TwoRanks, AnyNumberIsAnnouncedAtATime) {
  for (int i = 0; i < kMany; ++i) sender_.post(true, sent_[i], i);
  std::vector<int32_t> small = {7};
  sender_.post(true, small, kMany);
  sender_.move();
  std::vector<int32_t> last = {0};
  receiver_.post(false, last, kMany);
  receiver_.move();
  EXPECT_EQ(last, small);
  for (int i = kMany - 1; i >= 0; --i) {
    receiver_.post(false, received_[i], i);
    move_both();
    ASSERT_EQ(received_[i], sent_[i]) << i;
  }
  EXPECT_EQ(sender_.ended, kMany + 1);
}

TEST_F(TwoRanks, RefusalsThatFindNoRoomAreGivenLater) {
  std::vector<PostPtr> sends;
  std::vector<PostPtr> receives;
  for (int i = 0; i < kMany; ++i) sends.push_back(sender_.post(true, sent_[i], i));
  sender_.move();
  std::vector<int32_t> other(kCount - 1);
  for (int i = 0; i < kMany; ++i) receives.push_back(receiver_.post(false, other, i));
  std::vector<int32_t> good(kCount);
  sender_.post(true, sent_[3], kMany);
  receiver_.post(false, good, kMany);
  receiver_.move();
  EXPECT_LT(receiver_.ended, kMany);  // somebody has to go on for the others
  move_both();
  EXPECT_EQ(receiver_.ended, kMany + 1);
  EXPECT_EQ(sender_.ended, kMany + 1);
  for (const auto& posts : {sends, receives}) {
    for (const PostPtr& post : posts) EXPECT_EQ(post->error->status(), DPT_ERR_MISMATCH);
  }
  EXPECT_EQ(good, sent_[3]);
}

// Sent from registered memory, which the receiver reads while the sender does nothing.
class FromRegisteredMemory : public TwoRanks {
 protected:
  FromRegisteredMemory() {
    for (const auto& values : sent_) {
      blocks_.push_back(pool_.allocate(kCount * sizeof(int32_t)));
      std::memcpy(blocks_.back(), values.data(), kCount * sizeof(int32_t));
    }
    sender_.segment.set_pools(&pool_, {pool_.base(), nullptr});
    receiver_.segment.set_pools(&none_, {pool_.base(), nullptr});
    for (int i = 0; i < kMany; ++i) {
      sends_.push_back(sender_.post(true, blocks_[i], kCount, i));
      receives_.push_back(receiver_.post(false, received_[i], i));
    }
    sender_.move();
    receiver_.move();
    EXPECT_EQ(received_, sent_);
    EXPECT_LT(receiver_.ended, kMany);
  }

  MemoryPool pool_;
  MemoryPool none_;
  std::vector<void*> blocks_;
  std::vector<PostPtr> sends_;
  std::vector<PostPtr> receives_;
};

TEST_F(FromRegisteredMemory, AnyNumberIsTaken) {
  move_both();
  EXPECT_EQ(sender_.ended, kMany);
  EXPECT_EQ(receiver_.ended, kMany);
  for (const auto& posts : {sends_, receives_}) {
    for (const PostPtr& post : posts) EXPECT_FALSE(post->error);
  }
}

TEST_F(FromRegisteredMemory, WhatWasTakenCountsAlsoWhereTheSenderHasLeft) {
  sender_.segment.leave();
  receiver_.exchange.end_those_waiting_for_who_left();
  EXPECT_EQ(receiver_.ended, kMany);
  for (const PostPtr& post : receives_) EXPECT_FALSE(post->error);
  std::vector<int32_t> more(kCount);
  const PostPtr late = receiver_.post(false, more, 0);
  receiver_.exchange.end_those_waiting_for_who_left();
  EXPECT_THAT(late->error->what(), HasSubstr("left"));
}

}  // namespace
}  // namespace dpt::testing
