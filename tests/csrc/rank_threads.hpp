// Ranks as threads of one process, meeting at an in-memory store and talking to the core through
// its C ABI, as the adapter does.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "bootstrap/hash_store.hpp"
#include "deepytorch.h"

namespace dpt::testing {

// The tuner has spent all it may. That takes a test's word here, since no test runs long enough to
// spend the budget that it starts with.
void spend_budget();

// A status other than DPT_OK, with the core's message.
class Failure : public std::runtime_error {
 public:
  Failure(dpt_status status, const std::string& message)
      : std::runtime_error(message), status(status) {}
  const dpt_status status;
};

// Records what the stock backend was asked to do. It answers with `status`.
struct RecordingDelegate {
  std::vector<dpt_collective> calls;
  std::vector<int> node_of;  // of the last call that was to go by nodes
  dpt_status status = DPT_OK;
  std::string message = "the delegate's own words";       // with any other status
  std::function<dpt_status(const dpt_request&)> execute;  // empty: the tuner has no such candidate
  std::atomic<dpt_waits> is_waiting = DPT_WAITS_NOT;      // for a rank, on the device
  std::atomic<int> times_abandoned = 0;
  dpt_delegate table();
};

struct RankOptions {
  std::string group;                  // run_ranks makes one up
  std::vector<int64_t> global_ranks;  // empty: 0, 1, ...
  bool native = true;
  std::function<bool()> interrupted;
  dpt_tune tune = DPT_TUNE_OFF;
  bool raise_errors = false;
  std::string profile;
  std::function<std::string(const std::string& failure)> explain;
  std::function<dpt_status(const dpt_request&)> execute;  // see RecordingDelegate
};

// The result of an asynchronous operation. Not a std::future: the thread sanitizer does not see
// how libstdc++ hands exceptions from one thread to another.
class Pending {
 public:
  void complete(dpt_status status, const std::string& message);
  bool is_ready() const;
  void get() const;  // waits; throws Failure

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    dpt_status status = DPT_OK;
    std::string message;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// A dpt_request with the pointer arrays it points to.
struct Request {
  dpt_request request{};
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  std::vector<size_t> input_counts;
  std::vector<size_t> output_counts;

  Request(dpt_collective collective, dpt_data_type dtype, size_t count);
  Request& reduce_op(dpt_reduce_op op, double premul_factor = 1);
  Request& root(int rank);
  Request& timeout_ms(int64_t timeout);
  Request& not_native(const char* why);
  Request& input(const void* buffer);
  Request& output(void* buffer);
  // Elements of each input and output, where they differ.
  Request& counts(std::vector<size_t> of_inputs, std::vector<size_t> of_outputs);
  const dpt_request* get();
};

// An all_reduce that leaves the sum in `values`.
inline Request sum_in_place(std::vector<float>& values) {
  Request request(DPT_ALL_REDUCE, DPT_FLOAT32, values.size());
  request.reduce_op(DPT_SUM).input(values.data()).output(values.data());
  return request;
}

// One rank's membership of a group. Not copyable: the core keeps pointers into it.
class Rank {
 public:
  Rank(Store& store, int rank, int size, RankOptions options = {});
  ~Rank();
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  RecordingDelegate& delegate() { return delegate_; }
  // Counts operations on GPUs that went the short way.
  int num_known() const { return num_known_; }

  // Throws Failure. The outcome is never DPT_STARTED.
  dpt_outcome run(Request& request);
  dpt_outcome run(Request&& request) { return run(request); }
  // The places of those that are to be started on the delegate in one piece; they are not.
  std::vector<size_t> begin_coalesced(const std::vector<Request>& requests);
  // `request` may die at once, the buffers may not.
  Pending start(Request&& request);
  void barrier(int64_t timeout_ms = 20000);
  void abort(const std::string& reason);
  void destroy();  // before the destructor does

 private:
  int rank_;
  int size_;
  RankOptions options_;
  std::unique_ptr<Store> store_;
  RecordingDelegate delegate_;
  dpt_comm* comm_ = nullptr;
  int num_known_ = 0;

  bool run_known(Request& request);
};

// Calls `body` once per rank, each in its own thread; rethrows the first failure.
void run_threads(int size, const std::function<void(int rank)>& body);

// The same with a group of `size` ranks over a store of its own.
void run_ranks(int size, const std::function<void(Rank& rank)>& body, RankOptions options = {});

// The Failure that `body` ends with; std::logic_error when it doesn't fail.
Failure failure_of(const std::function<void()>& body);

}  // namespace dpt::testing
