// The group in the core: made with the backend, ended before its delegates. Requests cross the C
// ABI here, and are counted.
//
// Thread safety: it holds no lock, the core guards itself. `count` and `submit` from any thread;
// `make`, `end` and `destroy` when nobody submits, as c10d asks of a group's end.
#pragma once

#include <unistd.h>

#include <atomic>
#include <exception>

#include "group_setup.hpp"

namespace dpt::c10d_adapter {

class NativeGroup {
 public:
  // `delegate`: what it points to outlives the group.
  NativeGroup(const GroupSetup& setup, const dpt_delegate& delegate)
      : setup_(setup), delegate_(delegate) {}
  NativeGroup(const NativeGroup&) = delete;
  NativeGroup& operator=(const NativeGroup&) = delete;

  // Makes it, also again once it has ended; the ranks meet at the next operation.
  void make();
  // Ends it after what is under way, once the other ranks have made theirs.
  void end();
  // Ends it when nobody holds the backend any more, and waits for no other rank.
  void destroy();
  // Ends what is under way; nothing where the group has ended.
  void abort(const char* reason);

  bool is_open() const { return comm_ != nullptr; }
  // Throws where the group was destroyed. `title`: the operation's.
  void check_open(const char* title) const;
  dpt_comm* comm() const { return comm_; }

  // Counts an operation, and returns its number.
  uint64_t count(bool is_message);
  uint64_t num_collectives() const { return sequence_ - messages_; }

  // Hands a request to the core, and throws what it fails with. `delegates`: the delegate's own
  // exception, if it left one behind. `work` is told of the end; nullptr: nobody is.
  void submit(const dpt_request& request,
              const std::exception_ptr& delegates,
              c10::intrusive_ptr<NativeWork> work,
              dpt_outcome* outcome) const;
  // Throws the failure of an operation that was submitted.
  [[noreturn]] void throw_failure(dpt_status status,
                                  const std::exception_ptr& delegates,
                                  const dpt_error& error) const;

 private:
  // Waits, on rank 0, until the other ranks have made the group. Rank 0 keeps the store as a rule,
  // and would take it away from them. Gloo's ranks have met by then, but ours meet at their first
  // operation.
  void let_others_make_it() const;
  static int poll_signals(void*);
  static void explain_failure(void* context, const char* failure, char* sentence, size_t bytes);

  const GroupSetup& setup_;
  const dpt_delegate delegate_;
  dpt_comm* comm_ = nullptr;
  pid_t made_in_ = ::getpid();  // a forked child has no business in the store
  std::atomic<uint64_t> sequence_{0};
  std::atomic<uint64_t> messages_{0};  // of those, the sends and receives
};

}  // namespace dpt::c10d_adapter
