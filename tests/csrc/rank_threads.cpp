#include "rank_threads.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <thread>

#include "comm/c_api.hpp"
#include "comm/decisions.hpp"

namespace dpt::testing {
namespace {

constexpr int64_t kTimeoutMs = 20000;

// Tests must find the same on a slow machine, so the tuner's budget of real time is out of reach.
constexpr double kBudgetUs = 1e9;
const bool budget_is_lifted = [] {
  Decisions::instance().set_budget_us(kBudgetUs);
  return true;
}();

void check(dpt_status status, const dpt_error& error) {
  if (status != DPT_OK) throw Failure(status, error.message);
}

// As torch does: every group sees the store through a prefix of its own.
class PrefixStore : public Store {
 public:
  PrefixStore(Store& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override {
    store_.set(prefix_ + "/" + key, value);
  }
  std::optional<std::string> get(const std::string& key,
                                 std::chrono::milliseconds timeout) override {
    return store_.get(prefix_ + "/" + key, timeout);
  }

 private:
  Store& store_;
  std::string prefix_;
};

dpt_store table_of(Store& store) {
  return {&store,
          [](void* context, const char* key, const void* data, size_t bytes, dpt_error*) {
            static_cast<Store*>(context)->set(key, {static_cast<const char*>(data), bytes});
            return DPT_OK;
          },
          [](void* context,
             const char* key,
             int64_t timeout_ms,
             void* data,
             size_t capacity,
             size_t* bytes,
             dpt_error*) {
            const auto value =
                static_cast<Store*>(context)->get(key, std::chrono::milliseconds(timeout_ms));
            if (!value) return DPT_ERR_TIMEOUT;
            *bytes = value->size();
            std::memcpy(data, value->data(), std::min(capacity, value->size()));
            return DPT_OK;
          }};
}

}  // namespace

void spend_budget() { Decisions::instance().add_spent_us(kBudgetUs); }

dpt_delegate RecordingDelegate::table() {
  const auto record = [](void* context, void* call, dpt_error* error) {
    auto* self = static_cast<RecordingDelegate*>(context);
    self->calls.push_back(static_cast<const dpt_request*>(call)->collective);
    std::strncpy(error->message, self->message.c_str(), sizeof error->message - 1);
    return self->status;
  };
  const auto run = [](void* context, const dpt_request* request, dpt_error*) {
    return static_cast<RecordingDelegate*>(context)->execute(*request);
  };
  const auto by_nodes = [](void* context, void* call, const int* node_of, dpt_error*) {
    auto* self = static_cast<RecordingDelegate*>(context);
    self->calls.push_back(static_cast<const dpt_request*>(call)->collective);
    self->node_of.assign(node_of, node_of + 4);
    return DPT_OK;
  };
  const auto is_waiting = [](void* context) {
    return static_cast<RecordingDelegate*>(context)->is_waiting.load();
  };
  const auto abandon = [](void* context) {
    ++static_cast<RecordingDelegate*>(context)->times_abandoned;
  };
  if (!execute) return {this, record, record, nullptr, by_nodes, is_waiting, abandon};
  return {this, record, record, run, by_nodes, is_waiting, abandon};
}

Request::Request(dpt_collective collective, dpt_data_type dtype, size_t count) {
  request.collective = collective;
  request.dtype = dtype;
  request.reduce_op = DPT_NO_REDUCE;
  request.premul_factor = 1;
  request.count = count;
  request.timeout_ms = kTimeoutMs;
}

Request& Request::reduce_op(dpt_reduce_op op, double premul_factor) {
  request.reduce_op = op;
  request.premul_factor = premul_factor;
  return *this;
}

Request& Request::root(int rank) {
  request.root = rank;
  return *this;
}

Request& Request::timeout_ms(int64_t timeout) {
  request.timeout_ms = timeout;
  return *this;
}

Request& Request::not_native(const char* why) {
  request.not_native = why;
  return *this;
}

Request& Request::input(const void* buffer) {
  inputs.push_back(buffer);
  return *this;
}

Request& Request::output(void* buffer) {
  outputs.push_back(buffer);
  return *this;
}

Request& Request::counts(std::vector<size_t> of_inputs, std::vector<size_t> of_outputs) {
  input_counts = std::move(of_inputs);
  output_counts = std::move(of_outputs);
  return *this;
}

const dpt_request* Request::get() {
  if (!input_counts.empty()) request.input_counts = input_counts.data();
  if (!output_counts.empty()) request.output_counts = output_counts.data();
  request.inputs = inputs.data();
  request.outputs = outputs.data();
  request.call = &request;
  return &request;
}

void Pending::complete(dpt_status status, const std::string& message) {
  std::lock_guard lock(state_->mutex);
  state_->status = status;
  state_->message = message;
  state_->done = true;
  state_->changed.notify_all();
}

bool Pending::is_ready() const {
  std::lock_guard lock(state_->mutex);
  return state_->done;
}

void Pending::get() const {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [this] { return state_->done; });
  if (state_->status != DPT_OK) throw Failure(state_->status, state_->message);
}

Rank::Rank(Store& store, int rank, int size, RankOptions options)
    : rank_(rank), size_(size), options_(std::move(options)) {
  store_ = std::make_unique<PrefixStore>(store, options_.group);
  if (options_.global_ranks.empty()) {
    options_.global_ranks.resize(size);
    std::iota(options_.global_ranks.begin(), options_.global_ranks.end(), 0);
  }
  const dpt_comm_options comm_options{
      options_.group.c_str(),
      rank_,
      size_,
      options_.global_ranks.data(),
      options_.native ? 1 : 0,
      [](void* context) {
        auto* self = static_cast<Rank*>(context);
        return self->options_.interrupted && self->options_.interrupted() ? 1 : 0;
      },
      this,
      options_.tune,
      options_.profile.c_str(),
      0,
      options_.raise_errors ? 1 : 0,
      options_.explain ? [](void* context, const char* failure, char* sentence, size_t bytes) {
        const auto* self = static_cast<Rank*>(context);
        std::snprintf(sentence, bytes, "%s", self->options_.explain(failure).c_str());
      } : static_cast<void (*)(void*, const char*, char*, size_t)>(nullptr),
      this};
  delegate_.execute = options_.execute;
  const dpt_store store_functions = table_of(*store_);
  const dpt_delegate delegate_functions = delegate_.table();
  dpt_error error{};
  check(api()->comm_create(&comm_options, &store_functions, &delegate_functions, &comm_, &error),
        error);
}

Rank::~Rank() { destroy(); }

void Rank::destroy() {
  if (comm_ != nullptr) api()->comm_destroy(comm_);
  comm_ = nullptr;
}

bool Rank::run_known(Request& request) {
  if (request.request.on_device == 0) return false;
  dpt_known begun{};
  if (api()->begin_known(comm_, request.get(), &begun) == 0) return false;
  ++num_known_;
  const dpt_delegate delegate = delegate_.table();
  dpt_error error{};
  const dpt_status status =
      begun.node_of != nullptr
          ? delegate.start_by_nodes(delegate.context, request.request.call, begun.node_of, &error)
          : delegate.start(delegate.context, request.request.call, &error);
  if (status == DPT_OK) {
    api()->record_end(begun.recorded, DPT_OK, 1);
  } else {
    check(api()->fail_known(comm_, request.get(), &begun, status, &error), error);
  }
  return true;
}

std::vector<size_t> Rank::begin_coalesced(const std::vector<Request>& requests) {
  std::vector<dpt_request> all;
  for (const Request& one : requests) all.push_back(one.request);
  std::vector<uint64_t> recorded(all.size());
  std::vector<int> begun(all.size());
  dpt_error error{};
  check(
      api()->begin_coalesced(comm_, all.data(), all.size(), recorded.data(), begun.data(), &error),
      error);
  std::vector<size_t> places;
  for (size_t i = 0; i < all.size(); ++i) {
    if (begun[i] == 0) continue;
    places.push_back(i);
    api()->record_end(recorded[i], DPT_OK, 1);
  }
  return places;
}

dpt_outcome Rank::run(Request& request) {
  if (run_known(request)) return DPT_DELEGATED;
  dpt_outcome outcome = DPT_COMPLETED;
  dpt_error error{};
  auto never = [](void*, dpt_status, const char*) { std::terminate(); };
  check(api()->submit(comm_, request.get(), never, nullptr, &outcome, &error), error);
  return outcome;
}

Pending Rank::start(Request&& request) {
  Pending pending;
  auto* const context = new Pending(pending);
  auto done = [](void* given, dpt_status status, const char* message) {
    const std::unique_ptr<Pending> owned(static_cast<Pending*>(given));
    owned->complete(status, message);
  };
  request.request.asynchronous = 1;
  dpt_outcome outcome = DPT_STARTED;
  dpt_error error{};
  const dpt_status status = api()->submit(comm_, request.get(), done, context, &outcome, &error);
  if (status != DPT_OK || outcome != DPT_STARTED) {
    done(context, status, error.message);  // the core will not
  }
  return pending;
}

void Rank::barrier(int64_t timeout_ms) {
  run(Request(DPT_BARRIER, DPT_UINT8, 0).timeout_ms(timeout_ms));
}

void Rank::abort(const std::string& reason) { api()->comm_abort(comm_, reason.c_str()); }

void run_threads(int size, const std::function<void(int rank)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

void run_ranks(int size, const std::function<void(Rank& rank)>& body, RankOptions options) {
  static std::atomic<int> num_groups = 0;
  if (options.group.empty()) options.group = "group" + std::to_string(num_groups++);
  HashStore store;
  run_threads(size, [&](int rank) {
    Rank member(store, rank, size, options);
    body(member);
  });
}

Failure failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Failure& failure) {
    return failure;
  }
  throw std::logic_error("expected a failure, and everything went well");
}

}  // namespace dpt::testing
