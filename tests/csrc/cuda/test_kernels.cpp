// The device kernels, on host threads (emulated_device.hpp), against sums in double and copies.
#include "cuda/gate.hpp"
#include "cuda/sum_pieces.hpp"
#include "emulated_group.hpp"

namespace dpt::cuda {
namespace {

enum class Way { kLowLatency, kPacket, kTwoShot };

template <typename T>
void check_all_reduce(EmulatedGroup& group,
                      int ranks,
                      Way way,
                      size_t count,
                      size_t shift,
                      ReduceOp op,
                      Grid grid = EmulatedGroup::kGrid) {
  auto inputs = random_inputs<T>(ranks, count, shift, static_cast<unsigned>(count + shift));
  std::vector<Shifted<T>> outputs;
  for (int rank = 0; rank < ranks; ++rank) outputs.emplace_back(count, shift);
  const bool in_place = count % 2 == 1;
  group.run(
      [&](int rank, const Launch& launch) {
        char* const output = in_place ? inputs[rank].bytes() : outputs[rank].bytes();
        const double average = op == DPT_AVG ? 1.0 / ranks : 1;
        const uint64_t bytes = count * sizeof(T);
        if (way != Way::kLowLatency) {
          auto* const run = way == Way::kPacket ? packet_all_reduce : two_shot_all_reduce;
          run(launch, {inputs[rank].bytes(), output, bytes, 1, average}, dtype_of<T>(), op);
        } else {
          ReduceArguments arguments{{}, output, bytes, 1, average};
          for (const char*& part : arguments.parts) part = inputs[rank].bytes();
          low_latency_reduce(launch, arguments, dtype_of<T>(), op);
        }
      },
      grid);
  group.expect_healthy();
  auto& reduced = in_place ? inputs : outputs;
  auto originals = random_inputs<T>(ranks, count, shift, static_cast<unsigned>(count + shift));
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(std::memcmp(reduced[rank].data(), reduced[0].data(), count * sizeof(T)), 0)
        << "rank " << rank;
    for (size_t i = 0; i < count; ++i) {
      const double expected = expected_of(originals, i, op);
      const double magnitude = 100.0 * ranks;
      ASSERT_NEAR(as_double<T>(reduced[rank][i]), expected, tolerance<T>() * magnitude)
          << "rank " << rank << " element " << i << " of " << count;
    }
  }
}

class KernelsOfRanks : public testing::TestWithParam<int> {};

TEST_P(KernelsOfRanks, AllReduceOfAnySizeAndAlignment) {
  const int ranks = GetParam();
  EmulatedGroup group(ranks);
  for (const size_t count : {1, 2, 3, 31, 64, 96}) {
    check_all_reduce<float>(group, ranks, Way::kLowLatency, count, count % 3, DPT_SUM);
  }
  for (const size_t count : {1, 5, 61, 333, 951}) {
    check_all_reduce<float>(group, ranks, Way::kPacket, count, count % 4, DPT_SUM);
  }
  for (const size_t count : {1, 5, 64, 333, 3001}) {
    check_all_reduce<float>(group, ranks, Way::kTwoShot, count, count % 3, DPT_SUM);
    check_all_reduce<__nv_bfloat16>(group, ranks, Way::kTwoShot, count, count % 5, DPT_AVG);
  }
}

// Fewer threads than packets, so that each has several.
TEST_P(KernelsOfRanks, AllReduceInFewThreads) {
  const int ranks = GetParam();
  EmulatedGroup group(ranks);
  for (const size_t count : {61, 300, 477}) {
    for (const size_t shift : {0, 1}) {
      check_all_reduce<float>(group, ranks, Way::kPacket, count, shift, DPT_SUM, {2, 8});
      check_all_reduce<float>(group, ranks, Way::kPacket, count, shift, DPT_SUM, {1, 16});
    }
  }
}

TEST_P(KernelsOfRanks, AllReduceOfEveryType) {
  const int ranks = GetParam();
  EmulatedGroup group(ranks);
  for (const Way way : {Way::kLowLatency, Way::kPacket, Way::kTwoShot}) {
    check_all_reduce<__half>(group, ranks, way, 77, 1, DPT_SUM);
    check_all_reduce<__nv_bfloat16>(group, ranks, way, 78, 0, DPT_AVG);
    check_all_reduce<float>(group, ranks, way, 79, 0, DPT_AVG);
  }
  const Way small = Way::kLowLatency;
  check_all_reduce<__nv_bfloat16>(group, ranks, small, 78, 0, DPT_MAX);
  check_all_reduce<double>(group, ranks, small, 41, 0, DPT_AVG);
  check_all_reduce<int32_t>(group, ranks, small, 55, 1, DPT_MIN);
  check_all_reduce<int64_t>(group, ranks, small, 33, 0, DPT_SUM);
}

TEST_P(KernelsOfRanks, ReduceScatter) {
  const int ranks = GetParam();
  EmulatedGroup group(ranks);
  for (auto* const run : {low_latency_reduce, packet_reduce_scatter, push_reduce_scatter}) {
    for (const size_t count : {1, 9, 60, 777}) {
      if (run == low_latency_reduce && count * 2 > EmulatedGroup::kMostInLines) continue;
      auto inputs = random_inputs<__nv_bfloat16>(ranks, count * ranks, 1, 5);
      std::vector<Shifted<__nv_bfloat16>> outputs;
      for (int rank = 0; rank < ranks; ++rank) outputs.emplace_back(count, 3);
      group.run([&](int rank, const Launch& launch) {
        ReduceArguments arguments{{}, outputs[rank].bytes(), count * 2, 0.5, 1};
        for (int part = 0; part < ranks; ++part) {
          arguments.parts[part] = inputs[rank].bytes() + part * count * 2;
        }
        run(launch, arguments, DPT_BFLOAT16, DPT_PREMUL_SUM);
      });
      group.expect_healthy();
      for (int rank = 0; rank < ranks; ++rank) {
        for (size_t i = 0; i < count; ++i) {
          const double expected = expected_of(inputs, rank * count + i, DPT_SUM) / 2;
          ASSERT_NEAR(as_double(outputs[rank][i]), expected, 100.0 * ranks / 256);
        }
      }
    }
  }
}

// Parts of any size, also none: what uneven all_to_all, broadcast, gather and scatter are.
void check_exchange(EmulatedGroup& group, int ranks, bool low_latency, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_int_distribution<int> sizes(
      0, low_latency ? static_cast<int>(EmulatedGroup::kMostInLines) : 5000);
  std::vector<std::vector<size_t>> bytes(ranks, std::vector<size_t>(ranks));
  std::vector<std::vector<Shifted<uint8_t>>> sent(ranks);
  std::vector<std::vector<Shifted<uint8_t>>> received(ranks);
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      bytes[from][to] = random() % 4 == 0 ? 0 : sizes(random);
      sent[from].emplace_back(bytes[from][to], random() % 20);
      for (size_t i = 0; i < bytes[from][to]; ++i) sent[from][to][i] = random() & 255;
    }
  }
  for (int to = 0; to < ranks; ++to) {
    for (int from = 0; from < ranks; ++from) {
      received[to].emplace_back(bytes[from][to], random() % 20);
    }
  }
  group.run([&](int rank, const Launch& launch) {
    ExchangeArguments arguments{};
    for (int peer = 0; peer < ranks; ++peer) {
      arguments.send[peer] = sent[rank][peer].bytes();
      arguments.send_bytes[peer] = bytes[rank][peer];
      arguments.receive[peer] = received[rank][peer].bytes();
      arguments.receive_bytes[peer] = bytes[peer][rank];
    }
    (low_latency ? low_latency_exchange : push_exchange)(launch, arguments);
  });
  group.expect_healthy();
  for (int from = 0; from < ranks; ++from) {
    for (int to = 0; to < ranks; ++to) {
      EXPECT_EQ(std::memcmp(received[to][from].data(), sent[from][to].data(), bytes[from][to]), 0)
          << from << " -> " << to;
    }
  }
}

TEST_P(KernelsOfRanks, ExchangeOfAnySizes) {
  EmulatedGroup group(GetParam());
  for (unsigned seed = 0; seed < 6; ++seed) {
    check_exchange(group, GetParam(), seed % 2 == 0, seed);
  }
}

TEST_P(KernelsOfRanks, ExchangeOfEqualParts) {
  const int ranks = GetParam();
  EmulatedGroup group(ranks);
  for (const size_t count : {1, 16, 239, 240, 1000, 1919}) {
    ASSERT_LE(count, EmulatedGroup::kMostInPackets);
    auto inputs = random_inputs<float>(ranks, count, count % 2, 11);
    std::vector<Shifted<float>> outputs;
    for (int rank = 0; rank < ranks; ++rank) outputs.emplace_back(count * ranks, count % 3);
    group.run([&](int rank, const Launch& launch) {  // bytes of each: an all_gather
      ExchangeArguments arguments{};
      for (int peer = 0; peer < ranks; ++peer) {
        arguments.send[peer] = inputs[rank].bytes();
        arguments.receive[peer] = outputs[rank].bytes() + peer * count;
        arguments.send_bytes[peer] = arguments.receive_bytes[peer] = count;
      }
      packet_exchange(launch, arguments);
    });
    group.expect_healthy();
    for (int rank = 0; rank < ranks; ++rank) {
      for (int peer = 0; peer < ranks; ++peer) {
        EXPECT_EQ(std::memcmp(outputs[rank].bytes() + peer * count, inputs[peer].bytes(), count), 0)
            << count << " bytes, " << peer << " -> " << rank;
      }
    }
  }
}

// An all_gather, or a broadcast from `root`, in place where `count` is odd.
void check_ring(EmulatedGroup& group, int ranks, size_t count, int root = -1) {
  const bool gathers = root < 0;
  const bool in_place = count % 2 == 1;
  auto inputs = random_inputs<float>(ranks, count, count % 3, 11);
  std::vector<std::vector<Shifted<float>>> outputs(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    for (int from = 0; from < ranks; ++from) outputs[rank].emplace_back(count, (count + from) % 4);
  }
  const auto result = [&](int rank, int from) {
    return in_place && rank == from ? inputs[rank].bytes() : outputs[rank][from].bytes();
  };
  group.run([&](int rank, const Launch& launch) {
    RingArguments arguments{
        inputs[rank].bytes(), {}, count, gathers ? 0 : root, gathers ? ranks : 1};
    for (int from = 0; from < ranks; ++from) arguments.output[from] = result(rank, from);
    ring_exchange(launch, arguments);
  });
  group.expect_healthy();
  for (int rank = 0; rank < ranks; ++rank) {
    for (int from = 0; from < ranks; ++from) {
      if (!gathers && from != root) continue;
      EXPECT_EQ(std::memcmp(result(rank, from), inputs[from].bytes(), count), 0)
          << count << " bytes, " << from << " -> " << rank;
    }
  }
}

TEST_P(KernelsOfRanks, RoundTheRing) {
  const int ranks = GetParam();
  EmulatedGroup group(ranks);
  for (const size_t bytes : {1, 16, 127, 2003}) {
    check_ring(group, ranks, bytes);
    check_ring(group, ranks, bytes, static_cast<int>(bytes) % ranks);
  }
}

// Everything on one group in random order, with grids of different sizes: the books that kernels
// keep for each other must fit.
TEST_P(KernelsOfRanks, MixedOnOneGroup) {
  const int ranks = GetParam();
  EmulatedGroup group(ranks);
  std::mt19937 random(3);
  for (int round = 0; round < 12; ++round) {
    switch (random() % 5) {
      case 4:
        check_ring(group, ranks, random() % 4000 + 1, static_cast<int>(random() % (ranks + 1)) - 1);
        break;
      case 3:
        check_all_reduce<float>(group, ranks, Way::kPacket, random() % 900 + 1, 0, DPT_SUM);
        break;
      case 0:
        check_exchange(group, ranks, random() % 2 == 0, random());
        break;
      case 1:
        check_all_reduce<float>(group, ranks, Way::kTwoShot, random() % 900 + 1, 0, DPT_SUM);
        break;
      default:
        check_all_reduce<float>(group, ranks, Way::kLowLatency, random() % 90 + 1, 0, DPT_SUM);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, KernelsOfRanks, testing::Values(2, 3, 4));

TEST(Kernels, APeerThatNeverComesIsATimeout) {
  EmulatedGroup group(2);
  std::vector<float> data(500, 1);
  group.run(
      [&](int rank, const Launch& launch) {
        if (rank == 1) return;
        auto* const bytes = reinterpret_cast<char*>(data.data());
        two_shot_all_reduce(launch, {bytes, bytes, 2000, 1, 1}, DPT_FLOAT32, DPT_SUM);
        // Later ones end at once.
        two_shot_all_reduce(launch, {bytes, bytes, 2000, 1, 1}, DPT_FLOAT32, DPT_SUM);
      },
      {2, 64},
      std::chrono::milliseconds(50));
  EXPECT_EQ(group.status(0).code, HostStatus::kTimeout);
  EXPECT_EQ(group.status(0).peer, 1u);
  EXPECT_EQ(group.status(0).sequence, 1u);
}

// Rank r runs kernels[r]. One of them at least must say that the other is elsewhere.
void check_mismatch(const std::array<Way, 2>& kernels) {
  EmulatedGroup group(2);
  std::vector<float> data[2] = {std::vector<float>(8, 1), std::vector<float>(8, 2)};
  std::atomic<bool> over = false;
  // A thread that starts after its rank has noticed sends nothing, so the peer may wait for it in
  // vain. Ranks' hosts tell each other.
  std::thread hosts([&] {
    while (!over) {
      for (int rank = 0; rank < 2; ++rank) {
        if (load_acquire(&group.status(rank).code) != HostStatus::kNone) group.abort(1 - rank);
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  group.run([&](int rank, Launch launch) {
    launch.call.description = static_cast<uint32_t>(rank);
    auto* const bytes = reinterpret_cast<char*>(data[rank].data());
    switch (kernels[rank]) {
      case Way::kPacket:
        return packet_all_reduce(launch, {bytes, bytes, 32, 1, 1}, DPT_FLOAT32, DPT_SUM);
      case Way::kTwoShot:
        return two_shot_all_reduce(launch, {bytes, bytes, 32, 1, 1}, DPT_FLOAT32, DPT_SUM);
      case Way::kLowLatency:
        return low_latency_reduce(launch, {{bytes, bytes}, bytes, 32, 1, 1}, DPT_FLOAT32, DPT_SUM);
    }
  });
  over = true;
  hosts.join();
  int noticed = 0;
  for (int rank = 0; rank < 2; ++rank) {
    if (group.status(rank).code == HostStatus::kMismatch) {
      EXPECT_EQ(group.status(rank).peer, 1u - rank);
      ++noticed;
    } else {
      EXPECT_EQ(group.status(rank).code, HostStatus::kAborted);
    }
  }
  EXPECT_GE(noticed, 1);
}

TEST(Kernels, DifferentOperationsAreAMismatch) {
  check_mismatch({Way::kLowLatency, Way::kLowLatency});
}

// Each waits for data of a kind that the other doesn't send.
TEST(Kernels, DifferentKernelsAreAMismatch) {
  check_mismatch({Way::kPacket, Way::kLowLatency});
  check_mismatch({Way::kTwoShot, Way::kPacket});
  check_mismatch({Way::kLowLatency, Way::kTwoShot});
}

TEST(Kernels, TheHostCanEndAWait) {
  EmulatedGroup group(2);
  std::vector<float> data(8, 1);
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    group.abort(0);
  });
  group.run([&](int rank, const Launch& launch) {
    if (rank == 1) return;
    auto* const bytes = reinterpret_cast<char*>(data.data());
    two_shot_all_reduce(launch, {bytes, bytes, 32, 1, 1}, DPT_FLOAT32, DPT_SUM);
  });
  host.join();
  EXPECT_EQ(group.status(0).code, HostStatus::kAborted);
}

TEST(Kernels, WhatGaveUpHoldsItsStreamUntilTheHostHasDecided) {
  EmulatedGroup group(2);
  group.hold(0);
  std::vector<float> data(8, 1);
  std::atomic<bool> decided = false;
  std::thread host([&] {
    while (load_acquire(&group.status(0).code) == HostStatus::kNone) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    decided = true;
    group.release(0);
  });
  group.run(
      [&](int rank, const Launch& launch) {
        if (rank == 1) return;
        auto* const bytes = reinterpret_cast<char*>(data.data());
        two_shot_all_reduce(launch, {bytes, bytes, 32, 1, 1}, DPT_FLOAT32, DPT_SUM);
        EXPECT_TRUE(decided);
      },
      {1, 64},
      std::chrono::milliseconds(20));
  host.join();
}

TEST(Gate, OpensAtItsTicketOrAfterItsTime) {
  uint32_t word = 6;
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic_ref(word).store(7);
  });
  start_gate(nullptr, &word, 7, ~uint64_t{0});
  EXPECT_EQ(word, 7u);
  host.join();
  start_gate(nullptr, &word, 8, 1'000'000);  // nobody comes
}

// A staged group's: the others' pieces lie in a buffer, this rank's own is the caller's.
template <typename T>
void check_sum_pieces(int ranks, size_t count, size_t shift, ReduceOp op) {
  const auto seed = static_cast<unsigned>(count + shift);
  auto inputs = random_inputs<T>(ranks, count, shift, seed);
  auto originals = random_inputs<T>(ranks, count, shift, seed);
  const int rank = static_cast<int>(count) % ranks;
  const size_t bytes = count * sizeof(T);
  const size_t pitch = (bytes + 63) / 64 * 64;
  Shifted<char> others(pitch * ranks, 0);
  size_t filled = 0;
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer == rank) continue;
    std::memcpy(others.data() + filled, inputs[peer].data(), bytes);
    filled += pitch;
  }
  Shifted<T> output(count + 1, shift);
  std::memset(static_cast<void*>(output.data()), 0x3c, (count + 1) * sizeof(T));
  const T behind = output[count];
  char* const to = count % 2 == 1 ? inputs[rank].bytes() : output.bytes();  // or in place
  sum_pieces(
      {dtype_of<T>(), op, rank, ranks, inputs[rank].bytes(), others.bytes(), pitch, to, bytes},
      nullptr,
      {2, 8});
  const T* const sums = reinterpret_cast<const T*>(to);
  for (size_t i = 0; i < count; ++i) {
    const double expected = expected_of(originals, i, op);
    ASSERT_NEAR(as_double<T>(sums[i]), expected, tolerance<T>() * 100.0 * ranks)
        << "element " << i << " of " << count << ", " << ranks << " ranks";
  }
  EXPECT_EQ(as_double<T>(output[count]), as_double<T>(behind));
}

TEST_P(KernelsOfRanks, SumOfPieces) {
  for (const size_t count : {1, 7, 64, 333, 3000}) {
    for (const size_t shift : {0, 1, 3}) {
      check_sum_pieces<float>(GetParam(), count, shift, DPT_SUM);
      check_sum_pieces<__nv_bfloat16>(GetParam(), count, shift, DPT_AVG);
      check_sum_pieces<__half>(GetParam(), count, shift, DPT_SUM);
    }
  }
}

}  // namespace
}  // namespace dpt::cuda
