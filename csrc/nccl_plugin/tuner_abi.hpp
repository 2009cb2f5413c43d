// NCCL's interface for tuner plugins, versions 3 to 5, as its documentation describes it. It says
// which functions a plugin has and by which symbol NCCL finds it, and numbers what the plugin
// chooses from.
//
// Declared here because no package ships these headers. Only what the plugin needs has a name; what
// it passes over (descriptions of NVLink domains, tunable constants) is an opaque pointer.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

enum DptNcclResult : int { kNcclSuccess = 0, kNcclInternalError = 3 };

// Collectives by NCCL's ncclFunc_t.
enum DptNcclFunction : int {
  kNcclBroadcast = 0,
  kNcclReduce = 1,
  kNcclAllGather = 2,
  kNcclReduceScatter = 3,
  kNcclAllReduce = 4,
};

enum DptNcclLogLevel : int { kNcclLogWarn = 2, kNcclLogInfo = 3 };
constexpr unsigned long kNcclLogTuning = 64;
using DptNcclLog = void (*)(DptNcclLogLevel level,
                            unsigned long subsystem,
                            const char* file,
                            int line,
                            const char* format,
                            ...);

// The cost of an algorithm that NCCL can't use here; such entries stay as they are.
constexpr float kNcclNotAvailable = -1.0F;

// The cost table is a dense array of floats [num_algorithms][num_protocols], though the interface
// declares it otherwise. What costs least is taken.
struct DptNcclTunerV3 {
  const char* name;
  DptNcclResult (*init)(size_t num_ranks, size_t num_nodes, DptNcclLog log, void** context);
  DptNcclResult (*get_coll_info)(void* context,
                                 int function,
                                 size_t num_bytes,
                                 int num_pipe_ops,
                                 float** costs,
                                 int num_algorithms,
                                 int num_protocols,
                                 int* num_channels);
  DptNcclResult (*destroy)(void* context);
};

struct DptNcclTunerV4 {
  const char* name;
  DptNcclResult (*init)(size_t num_ranks, size_t num_nodes, DptNcclLog log, void** context);
  DptNcclResult (*get_coll_info)(void* context,
                                 int function,
                                 size_t num_bytes,
                                 int num_pipe_ops,
                                 float** costs,
                                 int num_algorithms,
                                 int num_protocols,
                                 int registered,
                                 int* num_channels);
  DptNcclResult (*destroy)(void* context);
};

struct DptNcclTunerV5 {
  const char* name;
  DptNcclResult (*init)(void** context,
                        uint64_t communicator,
                        size_t num_ranks,
                        size_t num_nodes,
                        DptNcclLog log,
                        void* nvlink_domains,
                        void* constants);
  DptNcclResult (*get_coll_info)(void* context,
                                 int function,
                                 size_t num_bytes,
                                 int num_pipe_ops,
                                 float** costs,
                                 int num_algorithms,
                                 int num_protocols,
                                 int registered,
                                 int* num_channels);
  DptNcclResult (*finalize)(void* context);
};

}  // extern "C"
