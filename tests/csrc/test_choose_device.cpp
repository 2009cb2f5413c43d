// Plans on the device: which kernel at which size, and that lines never overflow.
#include <gtest/gtest.h>

#include <algorithm>

#include "tuner/choose_device.hpp"

namespace dpt {
namespace {

using cuda::Layout;

constexpr Layout kLayout = Layout::of(4, 64 << 10);

TEST(ChooseDevice, SmallMessagesTravelInLines) {
  for (const Collective collective :
       {DPT_ALL_REDUCE, DPT_ALL_GATHER, DPT_REDUCE_SCATTER, DPT_ALL_TO_ALL, DPT_BROADCAST}) {
    const DevicePlan plan = choose_device(
        {.collective = collective, .bytes = 8192, .layout = kLayout, .not_native = ""});
    EXPECT_EQ(plan.algorithm, AlgorithmName::kLowLatency);
    EXPECT_EQ(plan.grid.channels, 8);
    EXPECT_EQ(plan.grid.threads, 128);
  }
}

TEST(ChooseDevice, MiddleSizesTravelInPackets) {
  for (const Collective collective :
       {DPT_ALL_REDUCE, DPT_ALL_GATHER, DPT_REDUCE_SCATTER, DPT_ALL_TO_ALL}) {
    const DevicePlan plan = choose_device(
        {.collective = collective, .bytes = 512 << 10, .layout = kLayout, .not_native = ""});
    EXPECT_EQ(plan.algorithm, AlgorithmName::kPacket);
  }
}

TEST(ChooseDevice, LargeOnesArePushed) {
  const size_t large = 64 << 20;
  EXPECT_EQ(choose_device(
                {.collective = DPT_ALL_REDUCE, .bytes = large, .layout = kLayout, .not_native = ""})
                .algorithm,
            AlgorithmName::kTwoShot);
  const DevicePlan plan = choose_device(
      {.collective = DPT_ALL_GATHER, .bytes = large, .layout = kLayout, .not_native = ""});
  EXPECT_EQ(plan.algorithm, AlgorithmName::kPush);
  EXPECT_EQ(plan.grid.channels, cuda::kMaxChannels);
}

// Ranks may not know each other's sizes, and those decide what goes in lines.
TEST(ChooseDevice, UnevenPartsGoAlikeWhateverTheirSize) {
  for (const size_t bytes : {size_t{0}, size_t{8}, size_t{8} << 20}) {
    const DevicePlan plan = choose_device({.collective = DPT_ALL_TO_ALL,
                                           .bytes = bytes,
                                           .even = false,
                                           .layout = kLayout,
                                           .not_native = ""});
    EXPECT_EQ(plan.algorithm, AlgorithmName::kPush);
    EXPECT_EQ(plan.grid.channels, cuda::kMaxChannels);
  }
}

TEST(ChooseDevice, WhatHasNoLargeKernelIsDelegatedBeyondLines) {
  ChooseDeviceRequest request{.collective = DPT_ALL_REDUCE,
                              .bytes = 1024,
                              .large = false,
                              .layout = kLayout,
                              .not_native = ""};
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kLowLatency);
  request.bytes = 1 << 20;
  const DevicePlan plan = choose_device(request);
  EXPECT_EQ(plan.algorithm, AlgorithmName::kDelegate);
  EXPECT_NE(plan.reason.find("small messages only"), std::string::npos);
}

TEST(ChooseDevice, LinesAndPacketsAlwaysFit) {
  for (uint32_t slot = 64 << 10; slot >= 4 << 10; slot /= 2) {
    const Layout layout = Layout::of(8, slot);
    for (size_t bytes = 1; bytes < 100'000'000; bytes = bytes * 9 / 8 + 1) {
      const DevicePlan plan = choose_device(
          {.collective = DPT_ALL_REDUCE, .bytes = bytes, .layout = layout, .not_native = ""});
      const AlgorithmName algorithm = plan.algorithm;
      if (algorithm == AlgorithmName::kLowLatency) {
        EXPECT_LE(bytes, most_in_lines(layout, plan.grid));
      } else if (algorithm == AlgorithmName::kPacket) {
        EXPECT_LE(bytes / 8, most_in_packets(layout, plan.grid));
      } else {
        EXPECT_LE(plan.chunk_bytes, slot);
      }
    }
  }
}

// With a delegate that competes, what is not known to be faster is its.
TEST(ChooseDevice, ByTheRuleTheDelegateServesWhatIsNotSmall) {
  const auto algorithm = [](Collective collective, size_t bytes, bool even = true) {
    return choose_device({.collective = collective,
                          .bytes = bytes,
                          .even = even,
                          .layout = kLayout,
                          .not_native = "",
                          .delegate = true})
        .algorithm;
  };
  EXPECT_EQ(algorithm(DPT_ALL_REDUCE, 64 << 10), AlgorithmName::kLowLatency);
  EXPECT_EQ(algorithm(DPT_ALL_REDUCE, 512 << 10), AlgorithmName::kPacket);
  EXPECT_EQ(algorithm(DPT_ALL_REDUCE, (512 << 10) + 8), AlgorithmName::kDelegate);
  EXPECT_EQ(algorithm(DPT_ALL_GATHER, 256 << 10), AlgorithmName::kPacket);
  EXPECT_EQ(algorithm(DPT_REDUCE_SCATTER, (256 << 10) + 8), AlgorithmName::kDelegate);
  EXPECT_EQ(algorithm(DPT_ALL_TO_ALL, 8, /*even=*/false), AlgorithmName::kDelegate);
}

TEST(ChooseDevice, WhatIsForAllMayGoRoundARing) {
  const auto is_tried = [](Collective collective, int size) {
    const std::vector<Candidate> found = device_candidates({.collective = collective,
                                                            .bytes = 64 << 20,
                                                            .layout = Layout::of(size, 64 << 10),
                                                            .not_native = ""});
    EXPECT_LT(found.size(), kMostDeviceCandidates);
    return std::any_of(found.begin(), found.end(), [](const Candidate& candidate) {
      return candidate.algorithm == AlgorithmName::kRing;
    });
  };
  EXPECT_TRUE(is_tried(DPT_ALL_GATHER, 4));
  EXPECT_TRUE(is_tried(DPT_BROADCAST, 4));
  EXPECT_FALSE(is_tried(DPT_BROADCAST, 2));
  EXPECT_FALSE(is_tried(DPT_ALL_TO_ALL, 4));
}

Decision decided(Candidate candidate) { return {candidate, "fastest measured", "", {}}; }

TEST(ChooseDevice, WhatWasSettledOnServesWhereItCan) {
  const Decision two_shot = decided({AlgorithmName::kTwoShot, 4096, 16, cuda::kMostThreads});
  ChooseDeviceRequest request{.collective = DPT_ALL_REDUCE,
                              .bytes = 1 << 20,
                              .layout = kLayout,
                              .not_native = "",
                              .delegate = true,
                              .tuned = &two_shot};
  const DevicePlan plan = choose_device(request);
  EXPECT_EQ(plan.algorithm, AlgorithmName::kTwoShot);
  EXPECT_EQ(plan.grid.channels, 16);
  EXPECT_EQ(plan.grid.threads, cuda::kMostThreads);
  EXPECT_EQ(plan.chunk_bytes, 4096);
  EXPECT_EQ(plan.reason, "fastest measured");
  request.large = false;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
  request.bytes = 64 << 10;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kLowLatency);
  const Decision stock = decided({AlgorithmName::kDelegate});
  request.tuned = &stock;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
  request.not_native = "for the test";
  EXPECT_EQ(choose_device(request).reason, "for the test");
}

// The fastest of the others that were measured in the same range, if it beats the delegate too.
TEST(ChooseDevice, WhatIsTooLargeForTheFastestGoesByTheNext) {
  const Candidate stock{AlgorithmName::kDelegate};
  const Candidate packet{AlgorithmName::kPacket, 0, 32, cuda::kMostThreads};
  const Candidate push{AlgorithmName::kPush, 16384, 32, cuda::kMostThreads};
  ChooseDeviceRequest request{.collective = DPT_REDUCE_SCATTER,
                              .bytes = 1 << 20,
                              .layout = kLayout,
                              .not_native = "",
                              .delegate = true};
  const Limits limits{request.bytes, true, true};
  const auto decision_with = [&](double push_us) {
    return decide({summarize(packet, {10}), summarize(push, {push_us}), summarize(stock, {20})},
                  limits,
                  "measured now");
  };
  const Decision clear = decision_with(12);
  const Decision equal = decision_with(20);
  request.tuned = &clear;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kPacket);
  request.bytes = 4 << 20;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kPush);
  request.tuned = &equal;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
}

// Copy engines serve what nothing replays; the rest goes to the fastest kernel, or the delegate.
TEST(ChooseDevice, CopyEnginesServeWhatGoesToAll) {
  constexpr size_t kBytes = 64 << 20;
  const auto request_for = [](Collective collective, size_t bytes) {
    return ChooseDeviceRequest{.collective = collective,
                               .bytes = bytes,
                               .layout = kLayout,
                               .not_native = "",
                               .delegate = true,
                               .copies = {.ranks = 4, .slot_bytes = 4 << 20, .depth = 3}};
  };
  const auto tries = [&](const ChooseDeviceRequest& request) {
    const std::vector<Candidate> found = device_candidates(request);
    return std::count_if(found.begin(), found.end(), [](const Candidate& each) {
      return each.algorithm == AlgorithmName::kCopyEngine;
    });
  };
  EXPECT_EQ(tries(request_for(DPT_ALL_GATHER, kBytes)), 2);
  EXPECT_EQ(tries(request_for(DPT_BROADCAST, kBytes)), 2);
  EXPECT_EQ(tries(request_for(DPT_ALL_GATHER, 4 * kBytes)), 1);  // of small chunks it is too many
  EXPECT_EQ(tries(request_for(DPT_ALL_GATHER, 1 << 20)), 0);
  EXPECT_EQ(tries(request_for(DPT_REDUCE_SCATTER, kBytes)), 0);
  ChooseDeviceRequest request = request_for(DPT_ALL_GATHER, kBytes);
  request.copies = {};
  EXPECT_EQ(tries(request), 0);

  request = request_for(DPT_ALL_GATHER, kBytes);
  const Measurement copies{{AlgorithmName::kCopyEngine, 4 << 20, 0, 0}, 10, 9.9, 10.1};
  const Measurement push{{AlgorithmName::kPush, 16 << 10, 32, 512}, 15, 14.9, 15.1};
  const Measurement stock{{AlgorithmName::kDelegate}, 20, 19.9, 20.1};
  const Limits limits{kBytes, true, true};
  Decision decision = decide({push, copies, stock}, limits, "measured now");
  EXPECT_NE(decision.reason.find("no multiprocessor"), std::string::npos);
  request.tuned = &decision;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kCopyEngine);
  EXPECT_EQ(choose_device(request).chunk_bytes, 4 << 20);
  request.replayed = true;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kPush);
  decision = decide({copies, stock}, limits, "measured now");
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
  request.replayed = false;
  request.copies = {};  // another group has no room for them
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
}

TEST(ChooseDevice, LinesThatDoNotFitAreNotUsedWhateverWasSettledOn) {
  const Decision lines = decided({AlgorithmName::kLowLatency, 0, 1, 512});
  ChooseDeviceRequest request{.collective = DPT_ALL_REDUCE,
                              .bytes = 16 << 10,
                              .layout = kLayout,
                              .not_native = "",
                              .tuned = &lines};
  EXPECT_EQ(choose_device(request).grid.channels, 1);
  request.bytes = 64 << 10;
  EXPECT_EQ(choose_device(request).grid.channels, 32);  // the rule of thumb's
  const Decision no_grid = decided({AlgorithmName::kLowLatency});
  request.tuned = &no_grid;
  EXPECT_EQ(choose_device(request).grid.channels, 32);
}

// Each is a multiprocessor less for computing.
TEST(ChooseDevice, AllChannelsOnlyWhereTheUsualNumberIsTooFew) {
  const auto grid = [](size_t bytes, int size, uint32_t slot) {
    const DevicePlan plan = choose_device({.collective = DPT_ALL_REDUCE,
                                           .bytes = bytes,
                                           .layout = Layout::of(size, slot),
                                           .not_native = ""});
    return std::string(name_of(plan.algorithm)) + " " + std::to_string(plan.grid.channels) + "x" +
           std::to_string(plan.grid.threads);
  };
  EXPECT_EQ(grid(1 << 10, 4, 16 << 10), "low_latency 1x128");
  EXPECT_EQ(grid(64 << 10, 4, 16 << 10), "low_latency 32x256");
  EXPECT_EQ(grid(1 << 20, 4, 16 << 10), "packet 32x288");
  EXPECT_EQ(grid(4 << 20, 4, 16 << 10), "packet 64x512");
  EXPECT_EQ(grid(16 << 20, 4, 16 << 10), "two_shot 64x512");
  EXPECT_EQ(grid(96 << 10, 8, 8 << 10), "low_latency 48x256");  // as many as its lines take
}

TEST(ChooseDevice, WithoutNvlinkThereAreNoPackets) {
  const Layout layout = Layout::of(4, 32 << 10, 32, /*packets=*/false);
  for (size_t bytes = 1; bytes < 100'000'000; bytes = bytes * 9 / 8 + 1) {
    const DevicePlan plan = choose_device(
        {.collective = DPT_ALL_REDUCE, .bytes = bytes, .layout = layout, .not_native = ""});
    EXPECT_NE(plan.algorithm, AlgorithmName::kPacket);
  }
}

// Trees are tried where links differ, and nothing else where some are missing.
TEST(ChooseDevice, AlongTreesWhereLinksDiffer) {
  const auto request_for = [](cuda::Wiring wiring, size_t bytes) {
    return ChooseDeviceRequest{.collective = DPT_ALL_REDUCE,
                               .bytes = bytes,
                               .layout = kLayout,
                               .wiring = wiring,
                               .not_native = ""};
  };
  const auto num_trees = [](const std::vector<Candidate>& found) {
    return std::count_if(found.begin(), found.end(), [](const Candidate& each) {
      return each.algorithm == AlgorithmName::kTree;
    });
  };
  for (size_t bytes = 64 << 10; bytes <= size_t{256} << 20; bytes *= 4) {
    const std::vector<Candidate> alike =
        device_candidates(request_for(cuda::Wiring::kAlike, bytes));
    EXPECT_EQ(num_trees(alike), 0);
    const std::vector<Candidate> unequal =
        device_candidates(request_for(cuda::Wiring::kUnequal, bytes));
    EXPECT_EQ(num_trees(unequal), 4);
    EXPECT_EQ(unequal.size(), alike.size() + 4);
    EXPECT_EQ(unequal[0].algorithm, alike[0].algorithm);
    const std::vector<Candidate> partial =
        device_candidates(request_for(cuda::Wiring::kPartial, bytes));
    EXPECT_EQ(num_trees(partial), 4);
    EXPECT_EQ(partial.size(), 4);
  }
  for (const Collective collective : {DPT_ALL_GATHER, DPT_REDUCE_SCATTER, DPT_ALL_TO_ALL}) {
    ChooseDeviceRequest request = request_for(cuda::Wiring::kUnequal, 4 << 20);
    request.collective = collective;
    EXPECT_EQ(num_trees(device_candidates(request)), 0);
  }
}

TEST(ChooseDevice, NothingButTreesServesWhereLinksAreMissing) {
  ChooseDeviceRequest request{.collective = DPT_ALL_REDUCE,
                              .bytes = 100,
                              .layout = kLayout,
                              .wiring = cuda::Wiring::kPartial,
                              .not_native = ""};
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kTree);
  request.bytes = 64 << 20;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kTree);
  const Decision two_shot = decided({AlgorithmName::kTwoShot, 16384, 32, cuda::kMostThreads});
  request.tuned = &two_shot;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kTree);
  request.delegate = true;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
  const Decision tree = decided({AlgorithmName::kTree, 16384, 32, cuda::kMostThreads});
  request.tuned = &tree;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kTree);
  request.wiring = cuda::Wiring::kAlike;  // times of other links
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);

  request.wiring = cuda::Wiring::kPartial;
  request.tuned = nullptr;
  request.delegate = false;
  for (const Collective collective : {DPT_ALL_GATHER, DPT_BROADCAST, DPT_ALL_TO_ALL}) {
    request.collective = collective;
    EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
    EXPECT_EQ(choose_device(request).reason,
              why_not_wired(cuda::Wiring::kPartial, collective, true));
  }
  EXPECT_EQ(why_not_wired(cuda::Wiring::kPartial, DPT_ALL_REDUCE, true), "");
  EXPECT_NE(why_not_wired(cuda::Wiring::kPartial, DPT_ALL_REDUCE, false), "");
  EXPECT_EQ(why_not_wired(cuda::Wiring::kUnequal, DPT_ALL_REDUCE, false), "");
}

// Between nodes all is the delegate's, which has two ways.
TEST(ChooseDevice, ADelegateThatCompetesGoesInStagesOnlyByADecision) {
  ChooseDeviceRequest request{.collective = DPT_ALL_REDUCE,
                              .bytes = 8 << 20,
                              .not_native = "no kernels",
                              .ranks = 4,
                              .nodes = 2};
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kInStages);
  for (const Collective collective :
       {DPT_ALL_GATHER, DPT_REDUCE_SCATTER, DPT_ALL_TO_ALL, DPT_BROADCAST}) {
    ChooseDeviceRequest other = request;
    other.collective = collective;
    other.bytes = 1 << 20;  // of each rank, if that is what a part is
    const bool in_stages = collective != DPT_BROADCAST;
    EXPECT_EQ(choose_device(other).algorithm,
              in_stages ? AlgorithmName::kInStages : AlgorithmName::kDelegate);
    other.bytes -= 2;
    EXPECT_EQ(choose_device(other).algorithm, AlgorithmName::kDelegate);
  }
  request.delegate = true;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
  EXPECT_EQ(choose_device(request).reason, "no kernels");

  Decision decision = decided({AlgorithmName::kInStages});
  decision.reason = "measured";
  request.tuned = &decision;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kInStages);
  EXPECT_EQ(choose_device(request).reason, "measured");
  request.even = false;
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
  request.even = true;
  request.bytes = (4 << 20) - 2;  // of the same range
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
  EXPECT_EQ(choose_device(request).reason, "no kernels");
  request.bytes = 4 << 20;
  request.nodes = 1;  // it can't
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);

  request.nodes = 2;
  decision.chosen = Candidate{AlgorithmName::kDelegate};
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
  EXPECT_EQ(choose_device(request).reason, "measured");
  decision.chosen = std::nullopt;  // nothing could be measured
  EXPECT_EQ(choose_device(request).algorithm, AlgorithmName::kDelegate);
  EXPECT_EQ(choose_device(request).reason, "no kernels");
}

// Any number of groups finds room; only the last ones' least share may go beyond the device.
TEST(OfferChannels, KernelsOfManyGroupsFindRoom) {
  int used = 0;
  std::vector<int> offers;
  for (int group = 0; group < 10; ++group) {
    offers.push_back(offer_channels(132, used));
    used += offers.back();
  }
  EXPECT_EQ(offers[0], 64);
  EXPECT_EQ(offers[1], 16);
  EXPECT_TRUE(std::is_sorted(offers.rbegin(), offers.rend()));
  EXPECT_LT(used, 132);
  EXPECT_EQ(offer_channels(20, 0), 8);
  EXPECT_EQ(offer_channels(132, 0, /*wanted=*/64), 64);
  EXPECT_EQ(offer_channels(132, 64, 64), 35);  // three quarters of the device for all together
  EXPECT_EQ(offer_channels(132, 99, 64), 2);
  EXPECT_EQ(offer_channels(132, 0, 5), 5);
}

TEST(DeviceCandidates, WhatWasSlowForItsAlgorithmIsNotTriedAtLargerSizes) {
  const auto of = [](AlgorithmName algorithm, size_t chunk, int channels) {
    return Candidate{algorithm, chunk, channels, 512};
  };
  const auto took = [](const Candidate& candidate, double us) {
    return Measurement{candidate, us, us, us};
  };
  const Candidate push = of(AlgorithmName::kPush, 16 << 10, 32);
  const Candidate in_small_chunks = of(AlgorithmName::kPush, 8 << 10, 32);
  const Candidate on_few_channels = of(AlgorithmName::kPush, 16 << 10, 16);
  const Candidate ring = of(AlgorithmName::kRing, 16 << 10, 32);
  const Candidate stock{AlgorithmName::kDelegate};
  const std::vector<Candidate> all{push, in_small_chunks, on_few_channels, ring, stock};
  const Entry smaller{took(push, 20),
                      took(in_small_chunks, 22.5),
                      took(on_few_channels, 21.9),
                      took(ring, 90),
                      took(stock, 40)};
  const auto names = [&](const Entry& entry) {
    std::vector<size_t> found;
    for (const Candidate& each : without_slow_variants(all, entry)) {
      found.push_back(each.chunk_bytes * 100 + static_cast<size_t>(each.channels));
    }
    return found;
  };
  // The ring is slow, but there is no better one.
  EXPECT_EQ(names(smaller),
            (std::vector<size_t>{
                (16 << 10) * 100 + 32, (16 << 10) * 100 + 16, (16 << 10) * 100 + 32, 0}));
  EXPECT_EQ(names({}).size(), all.size());
  // The candidate that was best there is none here.
  EXPECT_EQ(
      names({took(of(AlgorithmName::kPush, 64 << 10, 32), 5), took(in_small_chunks, 22.5)}).size(),
      all.size());
  const Candidate many{AlgorithmName::kCpuReduce, 1 << 20, 3, 12};
  const Candidate few{many.algorithm, 1 << 20, 3, 6};
  EXPECT_EQ(without_slow_variants({many, few}, {took(many, 19), took(few, 10)}).size(), 2);
  EXPECT_EQ(without_slow_variants({many, few}, {took(many, 21), took(few, 10)})[0].threads, 6);
}

// A large sum runs beside computing more often than not.
TEST(DeviceCandidates, LargeSumsTakeNoMoreMultiprocessorsThanNcclsDo) {
  const auto most_channels = [](Collective collective, size_t bytes, bool delegate) {
    int most = 0;
    for (const Candidate& each : device_candidates({.collective = collective,
                                                    .bytes = bytes,
                                                    .layout = Layout::of(4, 64 << 10, 64),
                                                    .not_native = "",
                                                    .delegate = delegate})) {
      most = std::max(most, each.channels);
    }
    return most;
  };
  EXPECT_EQ(most_channels(DPT_ALL_REDUCE, 4 << 20, true), 64);
  EXPECT_EQ(most_channels(DPT_ALL_REDUCE, 16 << 20, true), 32);
  EXPECT_EQ(most_channels(DPT_ALL_REDUCE, 64 << 20, true), 32);
  EXPECT_EQ(most_channels(DPT_ALL_REDUCE, 16 << 20, false), 64);  // nobody else's is at hand
  EXPECT_EQ(most_channels(DPT_REDUCE_SCATTER, 16 << 20, true), 64);
}

TEST(DeviceCandidates, BeginWithTheRuleOfThumbsAndDiffer) {
  for (int index = 0; index < kNumCollectives; ++index) {
    const auto collective = static_cast<Collective>(index);
    if (collective == DPT_BARRIER || collective == DPT_REDUCE) continue;
    for (size_t bytes = 64 << 10; bytes <= size_t{256} << 20; bytes *= 4) {
      ChooseDeviceRequest request{
          .collective = collective, .bytes = bytes, .layout = kLayout, .not_native = ""};
      const std::vector<Candidate> found = device_candidates(request);
      ASSERT_FALSE(found.empty());
      EXPECT_LE(found.size(), kMostDeviceCandidates);
      const DevicePlan rule = choose_device(request);
      EXPECT_EQ(found[0].algorithm, rule.algorithm);
      EXPECT_EQ(found[0].channels, rule.grid.channels);
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_EQ(known_algorithm(name_of(found[i].algorithm), true), found[i].algorithm);
        const Decision decision = decided(found[i]);
        request.tuned = &decision;
        const DevicePlan plan = choose_device(request);
        EXPECT_EQ(plan.grid.channels, found[i].channels);  // each serves the size it is tried at
        for (size_t other = 0; other < i; ++other) {
          EXPECT_FALSE(found[i].algorithm == found[other].algorithm &&
                       found[i].channels == found[other].channels &&
                       found[i].threads == found[other].threads &&
                       found[i].chunk_bytes == found[other].chunk_bytes);
        }
      }
    }
  }
}

}  // namespace
}  // namespace dpt
