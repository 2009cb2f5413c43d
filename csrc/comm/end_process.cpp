#include "comm/end_process.hpp"

#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

#include "base/log.hpp"

namespace dpt {
namespace {

// Together well within the time for which a kernel holds its stream.
constexpr std::chrono::seconds kExplaining{4};
constexpr std::chrono::seconds kGrace{3};

std::mutex mutex;
std::function<void(const std::string&)>& replacement() {
  static auto* const function = new std::function<void(const std::string&)>;
  return *function;
}

}  // namespace

void end_process(const std::string& reason, Instead instead) {
  {
    const std::lock_guard lock(mutex);
    if (replacement()) return replacement()(reason);
  }
  const char* const why =
      instead == Instead::kRaise
          ? "The GPU has not got that operation's results, so this process ends now, before "
            "anything is computed or saved from them; with DEEPYTORCH_ERROR_HANDLING=raise the "
            "group's next call raises instead."
          : "The program's thread is inside NCCL, which nothing else can end, so this process ends "
            "now.";
  write_to_stderr("deepytorch: " + reason + ". " + why + "\n");
  std::this_thread::sleep_for(kGrace);
  std::abort();
}

std::string begun_with(const std::function<std::string(const std::string&)>& explain,
                       const std::string& failure) {
  if (!explain) return failure;
  // Python's lock may be held for ever by whoever waits for the GPU.
  const auto said = std::make_shared<std::promise<std::string>>();
  std::future<std::string> sentence = said->get_future();
  std::thread([explain, failure, said] { said->set_value(explain(failure)); }).detach();
  if (sentence.wait_for(kExplaining) != std::future_status::ready) return failure;
  const std::string first = sentence.get();
  return first.empty() ? failure : first + "\n" + failure;
}

void replace_end_process(std::function<void(const std::string&)> instead) {
  const std::lock_guard lock(mutex);
  replacement() = std::move(instead);
}

}  // namespace dpt
