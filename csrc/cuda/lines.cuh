// Low-latency staging: every 16-byte line carries 8 bytes of data and, beside each 4 of them, the
// number of the operation. So its arrival is seen on the data itself, with no flag to wait for and
// no fence before it. (The idea of NCCL's LL protocol.)
#pragma once

#include "cuda/vectors.cuh"
#include "cuda/wait.cuh"

namespace dpt::cuda {

class Lines {
 public:
  DPT_DEVICE Lines(const GroupView& group, const CallView& call)
      : group_(group),
        call_(call),
        sequence_(counters_of(group).line_sequence[channel_index()] + 1) {}

  // Sends 8 bytes to `peer`, as this channel's line number `index`.
  DPT_DEVICE void send(int peer, uint64_t index, const Half& data) const {
    store_line(at(peer, group_.rank, index), {data.word[0], sequence_, data.word[1], sequence_});
  }

  // Waits for that line of `peer`; false when the group failed.
  DPT_DEVICE bool receive(int peer, uint64_t index, Half* data) const {
    const uint4* line = at(group_.rank, peer, index);
    uint4 value;
    const bool ok = wait_until(group_, call_, peer, [&] {
      value = load_line(line);
      return value.y == sequence_ && value.w == sequence_;
    });
    *data = {{value.x, value.z}};
    return ok;
  }

  // When all of the channel's lines are in: the next kernel uses the other copy.
  DPT_DEVICE void close() const {
    if (thread_index() == 0) counters_of(group_).line_sequence[channel_index()] = sequence_;
  }

 private:
  DPT_DEVICE uint4* at(int owner, int from, uint64_t index) const {
    const Layout& layout = group_.layout;
    const size_t area =
        (static_cast<size_t>(sequence_ & 1) * layout.channels + channel_index()) * layout.size +
        from;
    return reinterpret_cast<uint4*>(group_.blocks[owner] + Layout::lines_offset() +
                                    area * 2 * layout.line_bytes) +
           index;
  }

  const GroupView& group_;
  const CallView& call_;
  uint32_t sequence_;
};

}  // namespace dpt::cuda
