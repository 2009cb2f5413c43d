#include "staged_ranks.hpp"

#include <sys/socket.h>

#include "base/error.hpp"

namespace dpt::testing {

using staged::Board;

namespace {

NodeLayout layout_of(int ranks, const std::vector<int>& node_of) {
  if (node_of.empty()) return NodeLayout::one_node(ranks);
  NodeLayout layout;
  layout.node_of = node_of;
  for (int rank = 0; rank < ranks; ++rank) {
    if (node_of[rank] == layout.num_nodes()) layout.ranks.emplace_back();
    layout.local_of.push_back(layout.ranks_on(node_of[rank]));
    layout.ranks[node_of[rank]].push_back(rank);
  }
  return layout;
}

Reactor& reactor() {
  static auto* const instance = new Reactor;
  return *instance;
}

}  // namespace

FakeLinks::FakeLinks(const NodeLayout& layout) {
  for (int rank = 0; rank < layout.size(); ++rank) {
    of_rank_.push_back(std::make_shared<staged::Between>());
    of_rank_[rank]->on_trouble = host().on_trouble;
    for (int other = 0; other < rank; ++other) {
      if (!layout.linked(rank, other)) continue;
      Connection::Peer peers[2];
      peers[0].name = "rank " + std::to_string(other);
      peers[1].name = "rank " + std::to_string(rank);
      constexpr int kData = 2;
      for (int i = 0; i <= kData; ++i) {
        int fds[2];
        DPT_SYS_CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds));
        for (int end = 0; end < 2; ++end) {
          UniqueFd fd(fds[end]);
          (i == kData ? peers[end].control : peers[end].data.emplace_back()) = std::move(fd);
        }
      }
      of_rank_[rank]->links.add(other, std::move(peers[0]), host());
      of_rank_[other]->links.add(rank, std::move(peers[1]), host());
    }
  }
}

std::string FakeLinks::trouble() {
  const std::lock_guard lock(mutex_);
  return trouble_;
}

Connection::Host FakeLinks::host() {
  return {reactor(),
          [this](dpt_status, const std::string& reason) {
            const std::lock_guard lock(mutex_);
            if (trouble_.empty()) trouble_ = reason;
          },
          [] {}};
}

StagedRanks::StagedRanks(std::vector<std::unique_ptr<Process>>& processes,
                         const StagedOptions& options)
    : processes_(processes),
      layout_(layout_of(size(), options.node_of)),
      shape_{layout_.ranks_on(0),
             kStagedSlot,
             options.depth,
             options.threads,
             options.first_chunk,
             options.on_devices,
             layout_.num_nodes()} {
  for (int node = 0; node < shape_.nodes; ++node) {
    memory_.emplace_back(new (std::align_val_t{Board::kPage}) char[Board::bytes(shape_)]());
    Board::prepare(memory_[node].get(), shape_);
  }
  for (int rank = 0; rank < size() && options.on_devices; ++rank) {
    devices_.emplace_back(options.depth * kStagedSlot);
    slots_.push_back(devices_.back().data());
  }
  if (shape_.nodes > 1) links_ = std::make_unique<FakeLinks>(layout_);
  for (int rank = 0; rank < size(); ++rank) {
    const Board board(memory_[layout_.node_of[rank]].get(), shape_, slots_);
    FakeCopyEngine::Options engine{};
    engine.most_delay_us = rank == options.slow_rank ? 200 : options.delay_us;
    engine.one_queue = options.one_queue;
    engine.queues = processes[rank]->queues.get();
    engine.on_devices = options.on_devices;
    engine.allocations = options.allocations;
    if (rank == 0) engine.before_copy = options.before_copy_of_rank_0;
    engines_.push_back(std::make_unique<FakeCopyEngine>(7 * rank + 1, engine));
    engines_.back()->map(memory_[layout_.node_of[rank]].get(), Board::bytes(shape_), kStagedSlot);
    staged::Workers& workers = processes[rank]->workers;
    const staged::Membership ranks{layout_, rank};
    std::unique_ptr<staged::InternodeSender> sender;
    if (links_)
      sender = std::make_unique<staged::InternodeSender>(links_->take(rank), ranks, board);
    pipelines_.push_back(std::make_unique<staged::Pipeline>(
        board, ranks, workers, *engines_.back(), std::move(sender)));
    workers.add(pipelines_.back().get());
  }
}

StagedRanks::~StagedRanks() {
  for (int rank = 0; rank < size(); ++rank) {
    processes_[rank]->workers.remove(pipelines_[rank].get());
  }
}

}  // namespace dpt::testing
