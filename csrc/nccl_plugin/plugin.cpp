// The tuner plugin that NCCL loads: makes what the table names the cheapest in NCCL's own cost
// table.
//
// It adds nothing that NCCL does not offer. An algorithm that NCCL rules out for an operation stays
// ruled out. An operation that the table does not name is NCCL's alone. All ranks of a communicator
// must read equal tables, as they must agree on NCCL_ALGO. It can be loaded and unloaded at any
// time: it starts no thread, keeps nothing beyond a communicator's context, and lets no exception
// out. A table that can't be read, or that somebody else could have written, is said once per
// communicator and then counts as empty.
#include <exception>
#include <memory>
#include <optional>
#include <utility>

#include "base/env.hpp"
#include "base/error.hpp"
#include "base/trusted_file.hpp"
#include "nccl_plugin/choices.hpp"
#include "nccl_plugin/tuner_abi.hpp"

namespace dpt::nccl_plugin {
namespace {

struct Context {
  std::vector<Choice> choices;
};

constexpr off_t kMaxTableBytes = 4 << 20;  // some 20000 entries

std::string read_table(const std::string& path) {
  std::optional<std::string> text = read_trusted(path, kMaxTableBytes);
  if (!text) throw Error(DPT_ERR_SYSTEM, path + " is missing");
  return *std::move(text);
}

std::vector<Choice> load_choices(size_t nodes, size_t ranks, DptNcclLog log) {
  std::string path;
  try {
    path = env().nccl_table;
    if (path.empty()) return {};
    std::vector<Choice> own = choices_for(parse_choices(read_table(path)), nodes, ranks);
    if (log != nullptr) {
      log(kNcclLogInfo,
          kNcclLogTuning,
          __FILE__,
          __LINE__,
          "deepytorch: %zu choices for %zu ranks on %zu nodes from %s",
          own.size(),
          ranks,
          nodes,
          path.c_str());
    }
    return own;
  } catch (const std::exception& error) {
    if (log != nullptr) {
      log(kNcclLogWarn,
          kNcclLogTuning,
          __FILE__,
          __LINE__,
          "deepytorch: NCCL chooses by itself, the table %s: %s",
          path.c_str(),
          error.what());
    }
    return {};
  }
}

DptNcclResult open_context(size_t ranks, size_t nodes, DptNcclLog log, void** context) {
  try {
    *context = new Context{load_choices(nodes, ranks, log)};
    return kNcclSuccess;
  } catch (...) {
    return kNcclInternalError;  // no memory; NCCL then goes on without the plugin
  }
}

DptNcclResult apply(void* context,
                    int function,
                    size_t num_bytes,
                    float** costs,
                    int num_algorithms,
                    int num_protocols,
                    int* num_channels) {
  const auto& choices = static_cast<const Context*>(context)->choices;
  const Choice* choice = find_choice(choices, function, num_bytes);
  if (choice == nullptr) return kNcclSuccess;
  // An older NCCL knows fewer.
  if (choice->algorithm >= num_algorithms || choice->protocol >= num_protocols) return kNcclSuccess;
  float& cost =
      reinterpret_cast<float*>(costs)[choice->algorithm * num_protocols + choice->protocol];
  if (cost == kNcclNotAvailable) return kNcclSuccess;
  cost = 0.0F;
  if (choice->channels > 0) *num_channels = choice->channels;
  return kNcclSuccess;
}

DptNcclResult close_context(void* context) {
  delete static_cast<Context*>(context);
  return kNcclSuccess;
}

DptNcclResult open_v5(void** context,
                      uint64_t /*communicator*/,
                      size_t ranks,
                      size_t nodes,
                      DptNcclLog log,
                      void* /*nvlink_domains*/,
                      void* /*constants*/) {
  return open_context(ranks, nodes, log, context);
}

DptNcclResult choose_v3(void* context,
                        int function,
                        size_t num_bytes,
                        int /*num_pipe_ops*/,
                        float** costs,
                        int num_algorithms,
                        int num_protocols,
                        int* num_channels) {
  return apply(context, function, num_bytes, costs, num_algorithms, num_protocols, num_channels);
}

DptNcclResult choose_v4(void* context,
                        int function,
                        size_t num_bytes,
                        int /*num_pipe_ops*/,
                        float** costs,
                        int num_algorithms,
                        int num_protocols,
                        int /*registered*/,
                        int* num_channels) {
  return apply(context, function, num_bytes, costs, num_algorithms, num_protocols, num_channels);
}

}  // namespace
}  // namespace dpt::nccl_plugin

// NCCL looks for the newest that it knows.
extern "C" {
#define DPT_EXPORT __attribute__((visibility("default")))

DPT_EXPORT extern const DptNcclTunerV3 ncclTunerPlugin_v3;
DPT_EXPORT extern const DptNcclTunerV4 ncclTunerPlugin_v4;
DPT_EXPORT extern const DptNcclTunerV5 ncclTunerPlugin_v5;

const DptNcclTunerV3 ncclTunerPlugin_v3 = {"deepytorch",
                                           dpt::nccl_plugin::open_context,
                                           dpt::nccl_plugin::choose_v3,
                                           dpt::nccl_plugin::close_context};
const DptNcclTunerV4 ncclTunerPlugin_v4 = {"deepytorch",
                                           dpt::nccl_plugin::open_context,
                                           dpt::nccl_plugin::choose_v4,
                                           dpt::nccl_plugin::close_context};
const DptNcclTunerV5 ncclTunerPlugin_v5 = {"deepytorch",
                                           dpt::nccl_plugin::open_v5,
                                           dpt::nccl_plugin::choose_v4,
                                           dpt::nccl_plugin::close_context};
}
