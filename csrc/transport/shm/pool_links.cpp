#include "transport/shm/pool_links.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <sstream>
#include <utility>

#include "base/error.hpp"
#include "base/log.hpp"
#include "base/thread.hpp"
#include "bootstrap/exchange.hpp"

namespace dpt {
namespace {

// When what could not be sent is tried again.
constexpr int kRetryMs = 20;

std::string in_short(const std::string& trouble) {
  return "-" + trouble.substr(0, PoolLinks::kMostWords - 2);
}

}  // namespace

// A rank says this of itself.
struct PoolLinks::Member {
  std::string process;
  std::string address;
  int device = -1;
  size_t capacity = 0;

  std::string serialize() const {
    return process + " " + address + " " + std::to_string(device) + " " + std::to_string(capacity);
  }
  static Member parse(const std::string& text) {
    Member member;
    std::istringstream words(text);
    words >> member.process >> member.address >> member.device >> member.capacity;
    if (!words) throw Error(DPT_ERR_SYSTEM, "a rank sent a malformed greeting");
    return member;
  }
};

struct PoolLinks::Plan {
  std::vector<Member> members;
  int rank;
  // One rank of each process makes the links, for all of that process.
  bool leads = false;
  // Processes without a link that both sides know, each by its first rank.
  std::map<std::string, size_t> missing = {};

  const std::string& own() const { return members[rank].process; }
  std::map<std::string, size_t> peers() const {
    std::map<std::string, size_t> first;
    for (size_t rank = 0; rank < members.size(); ++rank) {
      if (members[rank].process != own()) first.emplace(members[rank].process, rank);
    }
    return first;
  }
};

PoolLinks::PoolLinks(std::unique_ptr<ChunkMemory> memory)
    : memory_(std::move(memory)), process_(random_id()), ranges_(memory_.get()) {}

PoolLinks::~PoolLinks() { rest(); }

// Nobody is in `join` meanwhile, which holds a use.
void PoolLinks::rest() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake();
  if (thread_.joinable()) thread_.join();
  Links ended;
  {
    std::lock_guard lock(mutex_);
    stop_ = false;
    ended = links_;
  }
  for (const auto& link : ended) drop(link);
  waker_.reset();
}

std::shared_ptr<const void> PoolLinks::use() {
  std::lock_guard lock(uses_mutex_);
  ++uses_;
  return {this, [this](const void*) {
            std::lock_guard lock(uses_mutex_);
            if (--uses_ == 0 && !forked_) rest();
          }};
}

ChunkPool& PoolLinks::pool(const ChunkPool::Shape& shape) {
  std::lock_guard lock(mutex_);
  std::unique_ptr<ChunkPool>& pool = pools_[shape.device];
  if (!pool) pool = std::make_unique<ChunkPool>(memory_.get(), shape);
  return *pool;
}

size_t PoolLinks::size() const {
  std::lock_guard lock(mutex_);
  return links_.size();
}

std::shared_ptr<PoolLink> PoolLinks::find(const std::string& process) const {
  std::lock_guard lock(mutex_);
  // The last that was made is one that both sides have.
  const auto found = std::find_if(
      links_.rbegin(), links_.rend(), [&](const auto& link) { return link->process() == process; });
  return found == links_.rend() ? nullptr : *found;
}

// Each round's words begin with a dash where a rank is in trouble; then all give it up.
PoolLinks::Joined PoolLinks::join(const Meeting& meeting) {
  std::string trouble;
  const auto attempt = [&](const std::function<void()>& step) {
    try {
      step();
    } catch (const Error& error) {
      trouble = error.what();
    }
  };
  std::vector<std::string> words;
  const auto all_well = [&](const std::string& mine) {
    words = meeting.all_gather(trouble.empty() ? mine : in_short(trouble));
    for (size_t rank = 0; rank < words.size(); ++rank) {
      if (words[rank].empty() || words[rank][0] != '-') continue;
      trouble = "rank " + std::to_string(rank) + " of the group: " + words[rank].substr(1);
      return false;
    }
    return true;
  };
  const std::shared_ptr<const void> used = use();
  const auto nothing = [&] { return Joined{{}, {}, trouble, nullptr}; };

  KeyedSocket listener;
  Member self{process_, ""};
  attempt([&] {
    ChunkPool& pool = meeting.pool();
    pool.prepare();
    self.device = pool.shape().device;
    self.capacity = pool.shape().capacity;
    listener = listen_abstract(&self.address);
  });
  if (!all_well(self.serialize())) return nothing();
  Plan plan{{}, meeting.rank};
  for (const std::string& each : words) plan.members.push_back(Member::parse(each));
  const auto first = std::find_if(plan.members.begin(), plan.members.end(), [&](const Member& one) {
    return one.process == process_;
  });
  plan.leads = first - plan.members.begin() == meeting.rank;

  attempt([&] { open_ranges(plan); });
  std::string linked = "+";
  for (const Member& member : plan.members) linked += find(member.process) ? '1' : '0';
  if (!all_well(linked)) return nothing();
  for (const auto& [process, rank] : plan.peers()) {
    const bool theirs = words[rank].at(1 + meeting.rank) == '1';
    if (linked[1 + rank] == '0' || !theirs) plan.missing.emplace(process, rank);
  }

  Links made;
  attempt([&] { made = connect(meeting, plan, listener); });
  if (!all_well("+")) return nothing();

  // Nothing can fail any more, so all ranks have registered memory in this group.
  add(std::move(made));
  if (plan.leads) subscribe(plan);
  Joined joined;
  for (const Member& member : plan.members) {
    if (member.process == process_) {
      joined.bases.push_back(own_pool(member.device).base());
      continue;
    }
    joined.ranges.push_back(ranges_.open(member.process, member.device, member.capacity));
    joined.bases.push_back(joined.ranges.back()->base());
  }
  joined.use = used;
  return joined;
}

// All ranks of a process do this, each for its own device.
void PoolLinks::open_ranges(const Plan& plan) {
  const int device = plan.members[plan.rank].device;
  for (const Member& member : plan.members) {
    if (member.process == process_) {
      own_pool(member.device).allow(device);
    } else {
      ranges_.open(member.process, member.device, member.capacity)->allow(device);
    }
  }
}

ChunkPool& PoolLinks::own_pool(int device) const {
  std::lock_guard lock(mutex_);
  return *pools_.at(device);
}

PoolLinks::Links PoolLinks::connect(const Meeting& meeting,
                                    const Plan& plan,
                                    const KeyedSocket& listener) {
  Links made;
  if (!plan.leads) return made;
  const auto link_to = [&](const std::string& process, UniqueFd socket) {
    made.push_back(std::make_shared<PoolLink>(process, std::move(socket), [this] { wake(); }));
  };
  // The one of two processes with the lower name dials.
  std::set<std::string> awaited;
  std::vector<std::pair<std::string, UniqueFd>> dialed;
  for (const auto& [process, rank] : plan.missing) {
    if (process < process_) {
      awaited.insert(process);
      continue;
    }
    UniqueFd socket = connect_abstract(plan.members[rank].address, meeting.wait);
    send_fds(socket, process_, {});  // so that it can tell whom it has accepted
    dialed.emplace_back(process, std::move(socket));
  }
  while (!awaited.empty()) {
    UniqueFd socket = accept_within(listener, meeting.wait.deadline.next_slice());
    if (socket.get() >= 0) {
      const std::string caller = receive_fds(socket, meeting.wait).text;
      if (awaited.erase(caller) != 0) link_to(caller, std::move(socket));
      continue;
    }
    meeting.wait.check();
    if (meeting.wait.deadline.expired()) {
      throw Error(DPT_ERR_SYSTEM, "a rank did not come to share its device memory");
    }
  }
  for (auto& [process, socket] : dialed) {
    await_acceptance(socket, meeting.wait);
    link_to(process, std::move(socket));
  }
  return made;
}

void PoolLinks::add(Links made) {
  if (made.empty()) return;
  {
    std::lock_guard lock(mutex_);
    for (auto& link : made) links_.push_back(std::move(link));
    start();
  }
  wake();
}

void PoolLinks::subscribe(const Plan& plan) {
  for (const auto& [process, rank] : plan.peers()) {
    const std::shared_ptr<PoolLink> link = find(process);
    if (!link) continue;  // it died meanwhile
    for (const Member& member : plan.members) {
      if (member.process == process_) own_pool(member.device).subscribe(link);
    }
  }
}

void PoolLinks::wake() { waker_.wake(); }

void PoolLinks::start() {
  if (thread_.joinable()) return;
  waker_ = Waker::make();
  thread_ = start_thread([this] { run(); });
}

void PoolLinks::run() {
  for (bool all_sent = true;;) {
    std::vector<pollfd> entries = {{waker_.fd(), POLLIN, 0}};
    {
      std::lock_guard lock(mutex_);
      if (stop_) return;
      for (const auto& link : links_) {
        if (!link->is_broken()) entries.push_back({link->socket(), POLLIN, 0});
      }
    }
    if (poll(entries.data(), entries.size(), all_sent ? -1 : kRetryMs) < 0) continue;
    waker_.clear();
    // Now, so that what came before the last wake is among them.
    Links links;
    {
      std::lock_guard lock(mutex_);
      links = links_;
    }
    all_sent = true;
    for (const auto& link : links) {
      if (link->is_broken()) continue;
      try {
        all_sent &= drive(*link);
      } catch (const Error& error) {
        if (link->has_ended()) {
          drop(link);
        } else {
          link->set_broken(error.what());
        }
      }
    }
  }
}

bool PoolLinks::drive(PoolLink& link) {
  UniqueFd file;
  while (const auto message = link.receive(&file)) handle(link, *message, file);
  return link.flush();
}

void PoolLinks::handle(PoolLink& link, const ChunkMessage& message, const UniqueFd& file) {
  ChunkMessage answer = message;
  switch (message.kind) {
    case ChunkMessage::kOffer:
      answer.kind = ChunkMessage::kMapped;
      try {
        const auto range = ranges_.find(link.process(), message.device);
        if (!range) throw Error(DPT_ERR_SYSTEM, "no group uses it");
        range->map(message, file);
      } catch (const Error& error) {
        answer.kind = ChunkMessage::kRefused;
        static std::atomic<bool> told{false};
        if (told.exchange(true)) return link.post(answer);
        log(LogLevel::kWarning,
            std::string("a peer's registered device memory can't be mapped, so collectives treat "
                        "it as ordinary memory: ") +
                error.what());
      }
      return link.post(answer);
    case ChunkMessage::kDrop:
      if (const auto range = ranges_.find(link.process(), message.device)) range->drop(message.id);
      answer.kind = ChunkMessage::kDropped;
      return link.post(answer);
    default: {
      ChunkPool* pool = nullptr;
      {
        std::lock_guard lock(mutex_);
        const auto found = pools_.find(message.device);
        if (found != pools_.end()) pool = found->second.get();
      }
      if (pool != nullptr) pool->answer(&link, message);
    }
  }
}

void PoolLinks::drop(const std::shared_ptr<PoolLink>& link) {
  std::vector<ChunkPool*> pools;
  {
    std::lock_guard lock(mutex_);
    std::erase(links_, link);
    for (const auto& [device, pool] : pools_) pools.push_back(pool.get());
  }
  for (ChunkPool* const pool : pools) pool->unsubscribe(link.get());
  if (!find(link->process())) ranges_.forget(link->process());
}

void PoolLinks::after_fork() {
  // No lock: only the forking thread exists here, and another may have held it.
  for (const auto& [device, pool] : pools_) pool->after_fork();
  for (const auto& link : links_) link->close_after_fork();
  waker_.reset();
  forked_ = true;
}

}  // namespace dpt
