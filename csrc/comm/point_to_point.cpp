#include "comm/point_to_point.hpp"

#include <utility>

#include "base/thread.hpp"
#include "comm/flight_record.hpp"

namespace dpt {
namespace {

// A driver that finds nothing to move looks at deadlines and at who left no more often than this.
constexpr std::chrono::milliseconds kCheckInterval{10};

}  // namespace

PointToPoint::PointToPoint(Host host)
    : host_(std::move(host)),
      exchange_(
          host_.segment, host_.group, [this](const PostPtr& post, std::optional<Error> error) {
            finished_.emplace_back(post, std::move(error));
          }) {}

PointToPoint::~PointToPoint() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  turn_.notify_all();
  host_.segment.ring(host_.segment.rank());
  if (thread_.joinable()) thread_.join();
  step();
  exchange_.end_all(Error(DPT_ERR_ABORTED, "the group was destroyed"));
  report();
}

PostPtr PointToPoint::make_post(const dpt_request& request) {
  const bool is_send = request.collective == DPT_SEND;
  const bool any = request.root == DPT_ANY_RANK && !is_send;
  if (!any && (request.root < 0 || request.root >= host_.segment.size())) {
    throw Error(DPT_ERR_INVALID,
                std::string(name_of(request.collective)) + " of group " + host_.group + ": peer " +
                    std::to_string(request.root) + " is not one of its " +
                    std::to_string(host_.segment.size()) + " ranks");
  }
  return std::make_shared<Post>(
      Post{.is_send = is_send,
           .peer = request.root,
           .partner = request.root,
           .tag = request.tag,
           .dtype = request.dtype,
           .count = request.count,
           .input = is_send ? request.inputs[0] : nullptr,
           .output = is_send ? nullptr : request.outputs[0],
           .source = request.source,
           .number = 0,
           .deadline = Deadline(std::chrono::milliseconds(request.timeout_ms))});
}

dpt_outcome PointToPoint::submit(const dpt_request& request,
                                 uint64_t recorded,
                                 dpt_done done,
                                 void* done_context) {
  const PostPtr post = make_post(request);
  post->recorded = recorded;
  post->done = done;
  post->done_context = done_context;
  {
    std::lock_guard lock(mutex_);
    post->number = ++posts_;
    inbox_.push_back(post);
    ++unfinished_;
  }
  if (try_become_driver()) {
    step();
    stop_driving();
  } else {
    host_.segment.ring(host_.segment.rank());  // the driver may be asleep
  }
  if (!request.asynchronous) {
    wait(post);
    return DPT_COMPLETED;
  }
  {
    std::lock_guard lock(mutex_);
    if (!post->finished) {
      post->started = true;
      if (!thread_.joinable()) thread_ = start_thread([this] { run(); });
      if (!driving_) turn_.notify_all();
      return DPT_STARTED;
    }
  }
  if (!post->error) return DPT_COMPLETED;
  // The starter of an operation hears of its failure where it waits for it.
  done(done_context, post->error->status(), post->error->what());
  return DPT_STARTED;
}

bool PointToPoint::try_become_driver() {
  std::lock_guard lock(mutex_);
  if (driving_) return false;
  driving_ = true;
  return true;
}

void PointToPoint::stop_driving() {
  {
    std::lock_guard lock(mutex_);
    driving_ = false;
    if (unfinished_ == 0) return;
  }
  // Somebody else's turn.
  changed_.notify_all();
  turn_.notify_all();
}

bool PointToPoint::step() {
  std::vector<PostPtr> fresh;
  {
    std::lock_guard lock(mutex_);
    fresh.swap(inbox_);
  }
  const bool posted = !fresh.empty();
  for (PostPtr& post : fresh) exchange_.post(std::move(post));
  bool moved = false;
  try {
    host_.segment.throw_if_aborted();
    moved = exchange_.progress();
  } catch (const Error& error) {
    exchange_.end_all(error);
    if (!finished_.empty() && finished_.back().second) host_.fail(*finished_.back().second);
  }
  report();
  return posted || moved;
}

void PointToPoint::report() {
  for (const auto& [post, error] : std::exchange(finished_, {})) {
    if (!error) {
      const std::chrono::duration<double, std::micro> elapsed =
          std::chrono::steady_clock::now() - post->start;
      host_.statistics->add(post->is_send ? DPT_SEND : DPT_RECV,
                            AlgorithmName::kMailbox,
                            "through shared memory",
                            post->bytes(),
                            elapsed.count());
    }
    FlightRecord::instance().end(post->recorded,
                                 error ? FlightRecord::kFailed : FlightRecord::kEnded);
    bool tell = false;
    {
      std::lock_guard lock(mutex_);
      post->finished = true;
      post->error = error;
      --unfinished_;
      tell = post->started;
    }
    changed_.notify_all();
    if (!tell) continue;
    post->done(post->done_context, error ? error->status() : DPT_OK, error ? error->what() : "");
  }
}

void PointToPoint::check() {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_check_) return;
  next_check_ = now + kCheckInterval;
  exchange_.end_those_waiting_for_who_left();
  if (const PostPtr late = exchange_.first_expired()) {
    const std::string peer = late->peer == DPT_ANY_RANK
                                 ? "any rank"
                                 : "rank " + std::to_string(host_.segment.global_rank(late->peer));
    const Error error(DPT_ERR_TIMEOUT,
                      exchange_.describe(*late) + " timed out after " +
                          std::to_string(late->deadline.timeout().count()) + " ms: no message " +
                          (late->is_send ? "was received by " : "came from ") + peer +
                          " with tag " + std::to_string(late->tag));
    host_.fail(error);
    exchange_.end_all(error);
  }
  report();
}

void PointToPoint::drive(WaitStyle style) {
  const uint32_t seen = host_.segment.rings();
  check();
  if (step()) return;
  if (unfinished_ == 0) return;
  host_.segment.await_ring(seen, kWaitSlice, style, spin_);
}

void PointToPoint::wait(const PostPtr& post) {
  bool interrupted = false;
  auto next_look = std::chrono::steady_clock::now() + kWaitSlice;
  std::unique_lock lock(mutex_);
  while (!post->finished) {
    if (driving_) {
      changed_.wait_for(lock, kWaitSlice, [&] { return post->finished || !driving_; });
      lock.unlock();
    } else {
      driving_ = true;
      lock.unlock();
      drive(host_.caller_style);
      lock.lock();
      driving_ = false;
      lock.unlock();
    }
    if (host_.interrupted && !interrupted && std::chrono::steady_clock::now() >= next_look) {
      next_look = std::chrono::steady_clock::now() + kWaitSlice;
      interrupted = host_.interrupted();
      // The operation uses the caller's memory: it must end before we return.
      if (interrupted) {
        host_.fail(Error(DPT_ERR_INTERRUPTED, exchange_.describe(*post) + " was interrupted"));
      }
    }
    lock.lock();
  }
  const bool more = unfinished_ > 0;
  lock.unlock();
  if (more) {
    changed_.notify_all();
    turn_.notify_all();
  }
  if (interrupted) {
    throw Error(DPT_ERR_INTERRUPTED, exchange_.describe(*post) + " was interrupted");
  }
  if (post->error) throw *post->error;
}

void PointToPoint::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    turn_.wait(lock, [&] { return stopping_ || (!driving_ && unfinished_ > 0); });
    if (stopping_) return;
    driving_ = true;
    while (unfinished_ > 0 && !stopping_) {
      lock.unlock();
      drive(WaitStyle::kBackground);
      lock.lock();
    }
    driving_ = false;
    changed_.notify_all();
  }
}

bool PointToPoint::drain(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, timeout, [&] { return unfinished_ == 0; });
}

}  // namespace dpt
