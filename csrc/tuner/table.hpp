// Measured times of every candidate plan, per collective and range of sizes, and which plan wins.
//
// Everything here is a pure function of its arguments: ranks that hold the same times choose alike.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string_view>
#include <vector>

#include "base/algorithm_name.hpp"
#include "base/types.hpp"

namespace dpt {

// Up to here latency decides and native code is far ahead: nothing is measured.
constexpr size_t kLatencyBytes = 16 << 10;

constexpr int kNumCollectives = DPT_ALL_TO_ALL + 1;
constexpr int kNumBuckets = 7;  // the last is the device's alone

// A group's ranks, whether those of a node outnumber its cores, its nodes, and for operations on
// GPUs what these are: groups that are alike in this share what was measured.
struct TuningClass {
  int ranks;
  bool oversubscribed;
  int nodes = 1;
  std::string_view device = {};  // model and links, of lasting text; empty: in the host's memory
  bool on_device() const { return !device.empty(); }
  auto operator<=>(const TuningClass&) const = default;
};

// One range of sizes: [first, last] bytes of one buffer (see dpt_request), measured at `nominal`.
struct SizeRange {
  size_t first;
  size_t nominal;
  size_t last;
};
SizeRange range_of(int bucket);
// The bucket of the largest sizes.
int last_bucket(const TuningClass& group);

// Up to here nothing is measured for this collective. Above kLatencyBytes that is where every rank
// reduces everything itself because ranks share cores: it takes one barrier instead of three, and
// barriers are what costs there.
size_t latency_bytes(Collective collective, bool oversubscribed);

// The bucket that serves a collective of this size, or nothing where no measurement is made. Sizes
// whose buffers would be too large to try out belong to the largest bucket that is tried.
std::optional<int> bucket_of(Collective collective, size_t bytes, const TuningClass& group);

// The sizes that go by what is measured in the bucket: of the largest that is tried, all above too.
SizeRange served_by(Collective collective, int bucket, const TuningClass& group);

// Buffers of one rank in an operation of `ranks`; an operation in place has one.
int num_buffers(Collective collective, int ranks);

struct Candidate {
  AlgorithmName algorithm;
  size_t chunk_bytes = 0;
  int channels = 0;  // the grid of a kernel on the device; 0 on the host
  int threads = 0;
  int delegated = 0;  // percent of the message that the delegate carries out at the same time
};

// The algorithm of that public name, if measurements can be of it; see algorithm_named.
std::optional<AlgorithmName> known_algorithm(std::string_view name, bool on_device);
bool is_delegate(const Candidate& candidate);

// Over the timed rounds; each round's time is that of the slowest rank.
struct Measurement {
  Candidate candidate;
  double median_us;
  double low_us;  // quartiles
  double high_us;
};
// Summarizes at least one time.
Measurement summarize(const Candidate& candidate, std::vector<double> times_us);

using Entry = std::vector<Measurement>;  // in the order of `candidates`

// Limits of what a group can use.
struct Limits {
  size_t max_chunk_bytes;
  bool delegate;
  bool on_device = false;
};

// The measurement that wins, nullptr when none is usable. Among native candidates the fastest, or
// the first that is as good within the noise, which is why the rule of thumb's comes first. The
// delegate only if it is faster beyond the noise: by 10%, and with its upper quartile below that
// winner's lower one. On the device it is the other way round, since NCCL is hard to beat. A native
// one wins only if it is faster than the delegate by 3%, with quartiles that do not overlap.
const Measurement* winner(const Entry& entry, const Limits& limits);

// One class's measurements.
class TimingTable {
 public:
  // Empty: not measured.
  const Entry& at(Collective collective, int bucket) const { return entries_[collective][bucket]; }
  Entry& at(Collective collective, int bucket) { return entries_[collective][bucket]; }
  // The measured bucket of this collective that is nearest to `bucket`, the larger of two.
  std::optional<int> nearest(Collective collective, int bucket) const;

 private:
  std::array<std::array<Entry, kNumBuckets>, kNumCollectives> entries_;
};

}  // namespace dpt
