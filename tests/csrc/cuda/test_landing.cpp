// Outputs in registered memory, where the peers' chunks land: the results, and not a byte beside
// them.
#include "cuda/landing.cuh"
#include "emulated_group.hpp"

namespace dpt::cuda {
namespace {

constexpr char kUntouched = 0x5a;

// A rank's output: at some place of its registered memory, or in a memory of its own. What lies
// around it is watched.
class Output {
 public:
  Output(EmulatedGroup& group, int rank, size_t bytes, bool registered, size_t shift)
      : bytes_(bytes), registered_(registered), own_(bytes + 4 * kMargin + kAlignment) {
    const auto address = reinterpret_cast<uintptr_t>(own_.data());
    const size_t to_alignment = (kAlignment - address % kAlignment) % kAlignment;
    around_ = registered ? group.pool(rank) : own_.data() + to_alignment;
    size_ = registered ? EmulatedGroup::kPoolBytes : own_.size() - to_alignment;
    data_ = around_ + kMargin + shift;
    std::memset(around_, kUntouched, size_);
  }
  char* data() { return data_; }
  void expect(const char* expected) const {
    EXPECT_EQ(std::memcmp(data_, expected, bytes_), 0);
    const auto is_untouched = [](char each) { return each == kUntouched; };
    EXPECT_TRUE(std::all_of(around_, data_, is_untouched));
    EXPECT_TRUE(std::all_of(data_ + bytes_, around_ + size_, is_untouched));
  }
  // As the host does it.
  bool lands() const { return registered_ && address_of(data_) % kLandingUnit == 0; }

 private:
  static constexpr size_t kMargin = 256;
  size_t bytes_;
  bool registered_;
  std::vector<char> own_;
  char* around_;
  size_t size_ = 0;
  char* data_ = nullptr;
};

std::vector<Output> outputs_of(EmulatedGroup& group, int ranks, size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Output> outputs;
  for (int rank = 0; rank < ranks; ++rank) {
    const bool all_land = seed % 4 == 0;
    const bool aligned = all_land || random() % 4 != 0;
    const size_t shift = random() % 32 * (aligned ? kLandingUnit : sizeof(float));
    outputs.emplace_back(group, rank, bytes, all_land || random() % 2 == 0, shift);
  }
  return outputs;
}

Launch landing_in(const Launch& launch, const Output& output, uint32_t sources = ~0u) {
  Launch landing = launch;
  landing.call.landings = output.lands() ? sources : 0;
  return landing;
}

void check_all_reduce(EmulatedGroup& group, int ranks, size_t count, unsigned seed) {
  const bool in_place = seed % 3 == 0;
  auto inputs = random_inputs<float>(ranks, count, 0, seed);
  auto outputs = outputs_of(group, ranks, count * sizeof(float), seed);
  if (in_place) {
    for (int rank = 0; rank < ranks; ++rank) {
      std::memcpy(outputs[rank].data(), inputs[rank].data(), count * sizeof(float));
    }
  }
  group.run([&](int rank, const Launch& launch) {
    char* const output = outputs[rank].data();
    two_shot_all_reduce(
        landing_in(launch, outputs[rank]),
        {in_place ? output : inputs[rank].bytes(), output, count * sizeof(float), 1, 1},
        DPT_FLOAT32,
        DPT_SUM);
  });
  group.expect_healthy();
  std::vector<float> sums(count);
  for (size_t i = 0; i < count; ++i) {
    for (int rank = 0; rank < ranks; ++rank) sums[i] += inputs[rank][i];  // in rank order
  }
  for (Output& output : outputs) output.expect(reinterpret_cast<const char*>(sums.data()));
}

// An all_gather of parts of `bytes`, by push_exchange or round the ring.
void check_all_gather(EmulatedGroup& group, int ranks, size_t bytes, bool rings, unsigned seed) {
  auto inputs = random_inputs<char>(ranks, bytes, seed % 5, seed);
  std::vector<char> expected;
  for (auto& input : inputs) expected.insert(expected.end(), input.data(), input.data() + bytes);
  auto outputs = outputs_of(group, ranks, bytes * ranks, seed);
  const bool in_place = seed % 3 == 0;
  group.run([&](int rank, const Launch& launch) {
    char* const output = outputs[rank].data();
    const char* const input = in_place ? output + rank * bytes : inputs[rank].data();
    if (in_place) std::memcpy(output + rank * bytes, inputs[rank].data(), bytes);
    uint32_t aligned = 0;
    ExchangeArguments exchange{};
    RingArguments ring{input, {}, bytes, 0, ranks};
    for (int peer = 0; peer < ranks; ++peer) {
      exchange.send[peer] = input;
      exchange.receive[peer] = ring.output[peer] = output + peer * bytes;
      exchange.send_bytes[peer] = exchange.receive_bytes[peer] = bytes;
      if (peer * bytes % kLandingUnit == 0) aligned |= 1u << peer;
    }
    const Launch landing = landing_in(launch, outputs[rank], aligned);
    rings ? ring_exchange(landing, ring) : push_exchange(landing, exchange);
  });
  group.expect_healthy();
  for (Output& output : outputs) output.expect(expected.data());
}

// Parts of any size, also none, each to its own place.
void check_all_to_all(EmulatedGroup& group, int ranks, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<size_t>> bytes(ranks, std::vector<size_t>(ranks));
  std::vector<std::vector<size_t>> at(ranks, std::vector<size_t>(ranks));  // [to][from]
  std::vector<size_t> ends(ranks, 0);
  for (int to = 0; to < ranks; ++to) {
    for (int from = 0; from < ranks; ++from) {
      bytes[to][from] = random() % 4 == 0 ? 0 : random() % 4000;
      at[to][from] = ends[to];
      ends[to] += bytes[to][from];
      if (random() % 2 == 0) ends[to] = (ends[to] + 15) / 16 * 16;
    }
  }
  const size_t most = *std::max_element(ends.begin(), ends.end());
  auto inputs =
      random_inputs<char>(ranks, most, seed % 7, seed);  // all of a rank's parts begin there
  auto outputs = outputs_of(group, ranks, most, seed);
  group.run([&](int rank, const Launch& launch) {
    uint32_t aligned = 0;
    ExchangeArguments exchange{};
    for (int peer = 0; peer < ranks; ++peer) {
      exchange.send[peer] = inputs[rank].data();
      exchange.send_bytes[peer] = bytes[peer][rank];
      exchange.receive[peer] = outputs[rank].data() + at[rank][peer];
      exchange.receive_bytes[peer] = bytes[rank][peer];
      if (at[rank][peer] % kLandingUnit == 0) aligned |= 1u << peer;
    }
    push_exchange(landing_in(launch, outputs[rank], aligned), exchange);
  });
  group.expect_healthy();
  for (int to = 0; to < ranks; ++to) {
    std::vector<char> expected(most, kUntouched);
    for (int from = 0; from < ranks; ++from) {
      std::memcpy(expected.data() + at[to][from], inputs[from].data(), bytes[to][from]);
    }
    outputs[to].expect(expected.data());
  }
}

class LandingsOfRanks : public testing::TestWithParam<int> {};

TEST_P(LandingsOfRanks, ResultsOfAnySize) {
  const int ranks = GetParam();
  EmulatedGroup group(ranks);
  unsigned seed = 0;
  for (const size_t count : {1, 5, 64, 333, 3001}) {
    for (int times = 0; times < 3; ++times) check_all_reduce(group, ranks, count, seed++);
  }
}

TEST_P(LandingsOfRanks, PartsOfAnySize) {
  const int ranks = GetParam();
  EmulatedGroup group(ranks);
  unsigned seed = 0;
  for (const size_t bytes : {1, 16, 127, 2000, 4003}) {
    for (const bool rings : {false, true}) {
      check_all_gather(group, ranks, bytes, rings, seed++);
      check_all_gather(group, ranks, bytes, rings, seed++);
    }
    check_all_to_all(group, ranks, seed++);
  }
}

// With and without landings on the same queues, one after the other.
TEST_P(LandingsOfRanks, MixedOnOneGroup) {
  const int ranks = GetParam();
  EmulatedGroup group(ranks);
  std::mt19937 random(9);
  for (unsigned round = 0; round < 16; ++round) {
    switch (random() % 4) {
      case 0:
        check_all_reduce(group, ranks, random() % 1500, round);
        break;
      case 1:
        check_all_to_all(group, ranks, round);
        break;
      default:
        check_all_gather(group, ranks, random() % 4000, random() % 2 == 0, round);
    }
  }
}

// More rounds than a queue has slots: by the time there is room again the announcement is there. In
// the second kernel, whose chunks have other numbers than 0.
TEST_P(LandingsOfRanks, AreUsed) {
  const int ranks = GetParam();
  const int queues = EmulatedGroup::kGrid.channels * (ranks - 1);
  constexpr size_t kBytes = size_t{8} * EmulatedGroup::kGrid.channels * EmulatedGroup::kSlotBytes;
  const auto check = [&](const std::function<void(EmulatedGroup&, unsigned seed)>& run) {
    EmulatedGroup group(ranks);
    for (const unsigned all_land : {4, 8}) run(group, all_land);
    for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(group.num_landed(rank), queues);
  };
  for (const bool rings : {false, true}) {
    check([&](EmulatedGroup& group, unsigned seed) {
      check_all_gather(group, ranks, kBytes, rings, seed);
    });
  }
  check([&](EmulatedGroup& group, unsigned seed) {
    check_all_reduce(group, ranks, kBytes * ranks / sizeof(float), seed);
  });
}

INSTANTIATE_TEST_SUITE_P(Sizes, LandingsOfRanks, testing::Values(2, 3, 4));

TEST(Landing, HoldsForOneKernel) {
  for (const uint32_t first : {0u, 1u, 77u, (1u << Landing::kStampBits) - 1, ~0u}) {
    for (const uint64_t offset : {uint64_t{0}, uint64_t{16}, (uint64_t{1} << 40) - 32}) {
      const uint64_t landing = Landing::at(first, offset);
      EXPECT_TRUE(Landing::is_for(landing, first));
      EXPECT_FALSE(Landing::is_for(landing, first + 1));
      EXPECT_EQ(Landing::offset_of(landing), offset);
    }
  }
  EXPECT_FALSE(Landing::is_for(Landing::kNone, 0));
}

}  // namespace
}  // namespace dpt::cuda
