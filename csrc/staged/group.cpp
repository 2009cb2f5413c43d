#include "staged/group.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "base/thread.hpp"
#include "transport/shm/fd_exchange.hpp"

namespace dpt::staged {
namespace {

// One group's slots have the first size when there is room; the second is the least that pays.
constexpr size_t kLargestSlot = 2 << 20;
constexpr size_t kSmallestSlot = 256 << 10;
// How long a group that goes away waits for its operations, and then for the device.
constexpr std::chrono::milliseconds kDestroyGrace{5000};
constexpr std::chrono::milliseconds kBrokenGrace{5000};
constexpr std::chrono::milliseconds kTrialLimit{2000};
constexpr std::chrono::microseconds kSpin{200};

Shape largest_shape(const Group::Setup& setup) {
  const NodeLayout& layout = setup.ranks.layout;
  Shape shape{layout.ranks_on(setup.ranks.node()), kLargestSlot, Group::kDepth};
  shape.nodes = layout.num_nodes();
  shape.threads = setup.threads;
  shape.on_devices = !setup.slots.empty();
  if (shape.on_devices) shape.slot_bytes = setup.slot_bytes;
  return shape;
}

Shape shape_for(const Group::Setup& setup) {
  Shape shape = largest_shape(setup);
  while (shape.slot_bytes > kSmallestSlot && Board::bytes(shape) > setup.staging_bytes) {
    shape.slot_bytes /= 2;
  }
  if (shape.ranks > Group::kMostRanks) {
    throw Error(DPT_ERR_SYSTEM,
                std::to_string(shape.ranks) + " ranks; CPU-Reduce serves up to " +
                    std::to_string(Group::kMostRanks));
  }
  if (Board::bytes(shape) > setup.staging_bytes) {
    throw Error(DPT_ERR_SYSTEM, "staging_mb is used up by other groups");
  }
  return shape;
}

// A rank tells the others this before memory is shared.
struct Hello {
  std::string address;  // the socket of a node's first rank; "-" for the others
  size_t slot_bytes = 0;
  int threads = 0;
  std::string why_not;  // it can't take part

  std::string serialize() const {
    return address + " " + std::to_string(slot_bytes) + " " + std::to_string(threads) + " " +
           why_not.substr(0, Group::kMostWords / 2);
  }
  static Hello parse(const std::string& text) {
    Hello hello;
    std::istringstream words(text);
    words >> hello.address >> hello.slot_bytes >> hello.threads >> std::ws;
    std::getline(words, hello.why_not);
    return hello;
  }
};

// It makes the memory that the ranks of its node share.
bool is_first(const Group::Setup& setup) { return setup.ranks.local() == 0; }

std::string name_rank(const Group::Setup& setup, size_t rank) {
  return "rank " + std::to_string(setup.global_ranks[rank]);
}

// All ranks learn of any rank's trouble and give it up together.
void agree(const Group::Setup& setup, const std::string& trouble) {
  const std::vector<std::string> troubles =
      setup.all_gather(trouble.substr(0, Group::kMostWords / 2));
  for (size_t rank = 0; rank < troubles.size(); ++rank) {
    if (!troubles[rank].empty()) {
      throw Error(DPT_ERR_SYSTEM, name_rank(setup, rank) + ": " + troubles[rank]);
    }
  }
}

// The text of what `step` throws; empty: nothing.
template <typename Step>
std::string trouble_in(const Step& step) {
  try {
    step();
    return "";
  } catch (const Error& error) {
    if (error.status() != DPT_ERR_SYSTEM) throw;
    return error.what();
  }
}

UniqueFd create_file(const Shape& shape) {
  UniqueFd file(DPT_SYS_CHECK(
      static_cast<int>(syscall(SYS_memfd_create, "deepytorch", 1u /* MFD_CLOEXEC */))));
  DPT_SYS_CHECK(ftruncate(file.get(), static_cast<off_t>(Board::bytes(shape))));
  return file;
}

// The first rank hands the file to who comes for it.
void hand_out(const Group::Setup& setup, const KeyedSocket& listener, const UniqueFd& file) {
  for (int served = 1; served < setup.ranks.layout.ranks_on(setup.ranks.node());) {
    const UniqueFd peer = accept_within(listener, setup.wait.deadline.next_slice());
    if (peer.get() >= 0) {
      send_fds(peer, "board", {file.get()});
      ++served;
      continue;
    }
    setup.wait.check();
    if (setup.wait.deadline.expired()) {
      throw Error(DPT_ERR_SYSTEM, "a rank did not fetch the group's staging memory");
    }
  }
}

UniqueFd fetch(const Group::Setup& setup, const std::string& address) {
  const UniqueFd socket = connect_abstract(address, setup.wait);
  await_acceptance(socket, setup.wait);
  Received received = receive_fds(socket, setup.wait);
  if (received.text != "board" || received.fds.size() != 1) {
    throw Error(DPT_ERR_SYSTEM, "a local process sent a malformed greeting");
  }
  return std::move(received.fds.front());
}

// Whether the device carries out words at all its driver tells only when asked for some.
void try_words(CopyEngine& engine, Word& word) {
  {
    const std::shared_ptr<void> entered = engine.enter();
    engine.write({Lane::kUp, 1}, word, 1);
    engine.wait({Lane::kDown, 0}, word, 1);
    engine.wait_for_bits({Lane::kDown, 1}, word, 1);
    engine.meet();
  }
  const Deadline limit(kTrialLimit);
  while (!engine.is_idle() && !limit.expired()) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  const bool works = engine.is_idle() && word.load(std::memory_order_acquire) == 1;
  word.store(1, std::memory_order_release);  // nothing waits any longer
  if (!works) throw Error(DPT_ERR_SYSTEM, "stream memory operations don't work on this GPU");
}

// The workers of this process, as long as one of its groups needs them; groups of devices that
// reach each other need fewer.
std::shared_ptr<Workers> workers_of_process(const Group::Setup& setup) {
  static std::mutex mutex;
  static auto* const pools = new std::weak_ptr<Workers>[2];
  const std::lock_guard lock(mutex);
  std::weak_ptr<Workers>& existing = pools[setup.slots.empty() ? 0 : 1];
  std::shared_ptr<Workers> workers = existing.lock();
  if (!workers) {
    const auto spin = setup.oversubscribed ? std::chrono::microseconds{0} : kSpin;
    workers = std::make_shared<Workers>(setup.threads, setup.cpus, spin);
    existing = workers;
  }
  return workers;
}

}  // namespace

class Group::Memory {
 public:
  Memory(const UniqueFd& file, size_t bytes) : bytes_(bytes) {
    struct stat info{};
    DPT_SYS_CHECK(fstat(file.get(), &info));
    if (static_cast<size_t>(info.st_size) != bytes) {
      throw Error(DPT_ERR_SYSTEM, "the group's staging memory has an unexpected size");
    }
    void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (memory == MAP_FAILED) throw_system_error("mmap of the group's staging memory");
    // A forked child (a DataLoader worker) must neither keep nor touch it.
    madvise(memory, bytes, MADV_DONTFORK);
    address_ = static_cast<char*>(memory);
  }
  ~Memory() { munmap(address_, bytes_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* address() const { return address_; }

 private:
  char* address_;
  size_t bytes_;
};

Group::Group(const Setup& setup, const Shape& shape) : ranks_(setup.ranks), shape_(shape) {}

std::unique_ptr<Group> Group::connect(const Setup& setup) {
  const std::shared_ptr<Workers> workers =
      setup.workers ? setup.workers : workers_of_process(setup);
  Hello hello{"-", 0, workers->size(), ""};
  KeyedSocket listener;
  hello.why_not = trouble_in([&] {
    hello.slot_bytes = shape_for(setup).slot_bytes;
    if (is_first(setup)) listener = listen_abstract(&hello.address);
  });
  Shape shape = largest_shape(setup);
  shape.threads = hello.threads;
  std::string address;
  const NodeLayout& layout = setup.ranks.layout;
  const int first_here = layout.ranks[setup.ranks.node()][0];
  const std::vector<std::string> words = setup.all_gather(hello.serialize());
  for (size_t rank = 0; rank < words.size(); ++rank) {
    const Hello peer = Hello::parse(words[rank]);
    if (!peer.why_not.empty()) {
      throw Error(DPT_ERR_SYSTEM, name_rank(setup, rank) + ": " + peer.why_not);
    }
    if (static_cast<int>(rank) == first_here) address = peer.address;
    shape.slot_bytes = std::min(shape.slot_bytes, peer.slot_bytes);
    shape.threads = std::min(shape.threads, peer.threads);
  }

  // In three steps, because a rank that lacks something must not let the others wait for it.
  std::unique_ptr<Group> group(new Group(setup, shape));
  UniqueFd file;
  agree(setup, trouble_in([&] {
          if (is_first(setup)) file = create_file(shape);
        }));
  agree(setup, trouble_in([&] {
          if (is_first(setup)) {
            hand_out(setup, listener, file);
          } else {
            file = fetch(setup, address);
          }
          group->memory_ = std::make_unique<Memory>(file, Board::bytes(shape));
          if (is_first(setup)) Board::prepare(group->memory_->address(), shape);
        }));
  agree(setup, trouble_in([&] {
          // Pages lie where they are touched first, and the device's neighbourhood is best.
          const Board board(group->memory_->address(), shape);
          if (!shape.on_devices) {
            start_thread([&] {
              run_near(setup.cpus);
              std::memset(board.inputs_of(setup.ranks.local()), 0, board.input_bytes());
              if (is_first(setup)) std::memset(board.result(0), 0, board.input_bytes());
            }).join();
          }
          group->engine_ = setup.make_engine();
          group->engine_->map(group->memory_->address(),
                              Board::bytes(shape),
                              shape.on_devices ? 0 : shape.slot_bytes);
          // Rewritten by the first operation.
          try_words(*group->engine_, board.description(setup.ranks.local(), 0));
        }));
  const Board board(group->memory_->address(), shape, setup.slots);
  group->workers_ = workers;
  std::unique_ptr<InternodeSender> sender;
  if (setup.between) sender = std::make_unique<InternodeSender>(setup.between, setup.ranks, board);
  group->pipeline_ =
      std::make_unique<Pipeline>(board, setup.ranks, *workers, *group->engine_, std::move(sender));
  group->workers_->add(group->pipeline_.get());
  return group;
}

Group::~Group() {
  if (!pipeline_) return;
  const auto wait_until = [](const auto& done, std::chrono::milliseconds limit) {
    const Deadline deadline(limit);
    while (!done() && !deadline.expired()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return done();
  };
  const auto has_ended = [&] { return pipeline_->is_quiet() && engine_->is_idle(); };
  wait_until([&] { return has_ended() || pipeline_->is_broken(); }, kDestroyGrace);
  if (!has_ended()) {
    pipeline_->break_off(Pipeline::Failure::kAborted, ranks_.rank);
    wait_until(
        [&] {
          pipeline_->release();
          pipeline_->end_waits();
          return engine_->is_idle();
        },
        kBrokenGrace);
  }
  workers_->remove(pipeline_.get());
  if (!engine_->is_idle()) {
    // A device that doesn't come to its end may yet write to this memory.
    engine_.release();
    memory_.release();
  }
}

void Group::start(const dpt_request& request,
                  const Cut& cut,
                  Stream stream,
                  const StartHooks& hooks) {
  const std::chrono::milliseconds timeout = limited(std::chrono::milliseconds(request.timeout_ms));
  pipeline_->enqueue(Job::of(request, cut, ranks_, shape_), timeout, stream, hooks);
}

void Group::stop_waiting() {
  if (!pipeline_->is_done()) abort();
}

void Group::abort() { pipeline_->break_off(Pipeline::Failure::kAborted, ranks_.rank); }

}  // namespace dpt::staged
