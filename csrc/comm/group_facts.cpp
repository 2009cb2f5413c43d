#include "comm/group_facts.hpp"

#include "base/error.hpp"
#include "base/types.hpp"
#include "comm/flight_record.hpp"
#include "tuner/choose.hpp"

namespace dpt {
namespace {

std::function<std::string(const std::string&)> explain_by(const dpt_comm_options& options) {
  if (options.explain == nullptr) return nullptr;
  return
      [explain = options.explain, context = options.explain_context](const std::string& failure) {
        std::vector<char> sentence(4096);
        explain(context, failure.c_str(), sentence.data(), sentence.size());
        return std::string(sentence.data());
      };
}

std::function<bool()> interrupted_by(const dpt_comm_options& options) {
  if (options.interrupted == nullptr) return nullptr;
  return [function = options.interrupted, context = options.interrupted_context] {
    return function(context) != 0;
  };
}

}  // namespace

GroupFacts::GroupFacts(const dpt_comm_options& options, const dpt_delegate& delegate)
    : name(options.group_name),
      rank(options.rank),
      global_ranks(options.global_ranks, options.global_ranks + options.size),
      native(options.native != 0),
      staging_bytes(options.staging_bytes),
      raise_errors(options.raise_errors != 0),
      forces_tuning(options.tune == DPT_TUNE_FORCE),
      explain(explain_by(options)),
      interrupted(interrupted_by(options)),
      delegate(delegate),
      statistics(make_group_statistics(name)),
      record_group(FlightRecord::instance().open_group(name, global_ranks)) {
  if (options.rank < 0 || options.rank >= options.size) {
    throw Error(DPT_ERR_INVALID,
                "group " + name + ": rank " + std::to_string(options.rank) + " is not one of its " +
                    std::to_string(options.size) + " ranks");
  }
}

std::string GroupFacts::place() const {
  return "group " + name + " on rank " + std::to_string(global_rank());
}

std::string GroupFacts::describe(Collective collective) const {
  return std::string(name_of(collective)) + " of " + place();
}

std::string GroupFacts::why_never_native(const dpt_request& request) const {
  if (!native) return "collectives=stock";
  if (!is_message(request.collective) && !is_native_collective(request.collective))
    return "no native algorithm yet";
  if (request.not_native != nullptr) return request.not_native;
  if (is_message(request.collective) && request.on_device != 0) {
    return std::string("no GPU kernel for ") + name_of(request.collective);
  }
  return "";
}

uint64_t GroupFacts::record(const dpt_request& request) const {
  return FlightRecord::instance().begin(record_group, request);
}

}  // namespace dpt
