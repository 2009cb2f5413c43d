// The C ABI: exceptions end here and become a status and a message.
#include "comm/c_api.hpp"

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "base/log.hpp"
#include "base/thread.hpp"
#include "comm/communicator.hpp"
#include "comm/fabric.hpp"
#include "comm/flight_record.hpp"
#include "cuda/device_group.hpp"

struct dpt_comm {
  dpt::Communicator communicator;
};

namespace dpt {
namespace {

// Groups that were destroyed before they connected and can still be invited to join.
constexpr size_t kMostRetired = 16;

template <typename Function>
dpt_status guarded(dpt_error* error, Function&& function) {
  try {
    function();
    return DPT_OK;
  } catch (const Error& caught) {
    set_message(error, caught.what());
    return caught.status();
  } catch (const std::exception& caught) {
    set_message(error, caught.what());
    return DPT_ERR_INTERNAL;
  }
}

// NOTE [Retired groups] A process may leave a group before it was connected, while others still use
// it. They invite the process, which joins without its program. After its last group it can be
// invited for kLeavingTime. Its word in the store says that it has left, so others need not wait.
class Retired {
 public:
  static Retired& instance() {
    static auto* const made = new Retired;
    return *made;
  }

  void add(std::unique_ptr<dpt_comm> comm) {
    std::unique_ptr<dpt_comm> oldest;
    std::lock_guard lock(mutex_);
    comms_.push_back(std::move(comm));
    if (comms_.size() <= kMostRetired) return;
    oldest = std::move(comms_.front());
    comms_.pop_front();
  }

  // Groups that the program has. After the last one these end as well, and with them all threads.
  void note_live(int more) {
    std::lock_guard lock(mutex_);
    live_ += more;
    if (live_ > 0 || comms_.empty() || ending_) return;
    ending_ = true;
    start_thread([this] { end(); }).detach();
  }

 private:
  void end() {
    std::this_thread::sleep_for(GroupBootstrap::kLeavingTime);
    std::deque<std::unique_ptr<dpt_comm>> comms;
    std::lock_guard lock(mutex_);
    ending_ = false;
    if (live_ == 0) comms.swap(comms_);
  }

  std::mutex mutex_;
  std::deque<std::unique_ptr<dpt_comm>> comms_;
  int live_ = 0;
  bool ending_ = false;
};

dpt_status comm_create(const dpt_comm_options* options,
                       const dpt_store* store,
                       const dpt_delegate* delegate,
                       dpt_comm** comm,
                       dpt_error* error) {
  return guarded(error, [&] {
    if (Fabric::forked()) {
      throw Error(DPT_ERR_SYSTEM,
                  "this process was made by fork() from one that had made groups before, and lacks "
                  "their threads and memory: start it by spawn, or make no group before");
    }
    *comm = new dpt_comm{{*options, std::make_unique<ForeignStore>(*store), *delegate}};
    Retired::instance().note_live(1);
  });
}

void comm_destroy(dpt_comm* comm) {
  // The progress thread does not exist in a forked child, so nothing there can be joined or freed.
  if (Fabric::forked()) return;
  std::unique_ptr<dpt_comm> owned(comm);
  if (comm->communicator.retire()) {
    Retired::instance().add(std::move(owned));
  } else {
    owned.reset();
  }
  Retired::instance().note_live(-1);
}

void comm_abort(dpt_comm* comm, const char* reason) { comm->communicator.abort(reason); }

dpt_status submit(dpt_comm* comm,
                  const dpt_request* request,
                  dpt_done done,
                  void* done_context,
                  dpt_outcome* outcome,
                  dpt_error* error) {
  return guarded(error,
                 [&] { *outcome = comm->communicator.submit(*request, done, done_context); });
}

dpt_status memory_allocate(size_t bytes, void** address, dpt_error* error) {
  return guarded(error, [&] { *address = Fabric::instance().memory().allocate(bytes); });
}

void memory_free(void* address) {
  dpt_error error{};
  if (guarded(&error, [&] { Fabric::instance().memory().free(address); }) != DPT_OK) {
    log(LogLevel::kError, error.message);  // the caller is a deleter, it has nobody to tell
  }
}

[[gnu::hot]] void record_end(uint64_t recorded, dpt_status status, int on_stream) {
  const FlightRecord::State state = status != DPT_OK ? FlightRecord::kFailed
                                    : on_stream != 0 ? FlightRecord::kIssued
                                                     : FlightRecord::kEnded;
  FlightRecord::instance().end(recorded, state);
}

void record_place(uint64_t recorded, const dpt_place* place) {
  FlightRecord::instance().note_place(recorded, *place);
}

[[gnu::hot]] void record_wait(uint64_t recorded) { FlightRecord::instance().note_wait(recorded); }

int event_ended(void* event) { return DeviceGroup::has_ended(event) ? 1 : 0; }

[[gnu::hot]] int begin_known(dpt_comm* comm, const dpt_request* request, dpt_known* begun) {
  return comm->communicator.begin_known(*request, begun) ? 1 : 0;
}

dpt_status fail_known(dpt_comm* comm,
                      const dpt_request* request,
                      const dpt_known* begun,
                      dpt_status status,
                      dpt_error* error) {
  dpt_status own = DPT_OK;
  const dpt_status ended = guarded(error, [&] {
    own = comm->communicator.fail_known(*request, begun->recorded, status, *error);
  });
  return ended == DPT_OK ? own : ended;
}

dpt_status begin_coalesced(dpt_comm* comm,
                           const dpt_request* requests,
                           size_t count,
                           uint64_t* recorded,
                           int* begun,
                           dpt_error* error) {
  return guarded(error,
                 [&] { comm->communicator.begin_coalesced(requests, count, recorded, begun); });
}

}  // namespace

const dpt_api* api() {
  static const dpt_api table{DPT_ABI_VERSION,
                             sizeof(dpt_api),
                             comm_create,
                             comm_destroy,
                             comm_abort,
                             submit,
                             memory_allocate,
                             memory_free,
                             DeviceGroup::capture_of,
                             event_ended,
                             record_end,
                             begin_known,
                             fail_known,
                             begin_coalesced,
                             record_place,
                             record_wait};
  return &table;
}

}  // namespace dpt
