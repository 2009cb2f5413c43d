/* C ABI of the torch-free core.
 *
 * The core (`deepytorch_core._core`) hands one `dpt_api` to the c10d adapter in a PyCapsule, so the
 * adapter links nothing and a process holds one copy of the core. Nothing here throws: a function
 * returns a status and, when it failed, writes a message that names operation, group and ranks.
 *
 * Thread safety: any function may be called from any thread. Operations of one communicator take
 * effect in the order in which `submit` was called.
 */
#ifndef DEEPYTORCH_H_
#define DEEPYTORCH_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DPT_ABI_VERSION 16
#define DPT_API_CAPSULE "deepytorch_core._core.dpt_api"

typedef enum dpt_status {
  DPT_OK = 0,
  DPT_ERR_INVALID = 1,     /* the caller's arguments are wrong */
  DPT_ERR_MISMATCH = 2,    /* ranks entered different operations, sizes or types */
  DPT_ERR_PEER_LOST = 3,   /* a rank died or left the group */
  DPT_ERR_TIMEOUT = 4,     /* a rank did not come in time */
  DPT_ERR_ABORTED = 5,     /* the group was aborted earlier; sticky */
  DPT_ERR_SYSTEM = 6,      /* a system call failed */
  DPT_ERR_INTERRUPTED = 7, /* the caller's `interrupted` said so (Ctrl-C) */
  DPT_ERR_DELEGATE = 8,    /* the delegate failed; it keeps its own exception */
  DPT_ERR_INTERNAL = 9,
  DPT_ERR_DELEGATE_BROKE = 10 /* as DPT_ERR_DELEGATE, from a delegate on a device: `message` says
                                 why, and other ranks may wait in it for this one without end */
} dpt_status;

typedef enum dpt_data_type {
  DPT_BOOL = 0,
  DPT_INT8,
  DPT_UINT8,
  DPT_INT16,
  DPT_INT32,
  DPT_INT64,
  DPT_FLOAT16,
  DPT_BFLOAT16,
  DPT_FLOAT32,
  DPT_FLOAT64,
  DPT_COMPLEX64,
  DPT_COMPLEX128,
  DPT_OTHER /* one the core can't reduce; `count` is bytes */
} dpt_data_type;

typedef enum dpt_reduce_op {
  DPT_SUM = 0,
  DPT_AVG,
  DPT_PRODUCT,
  DPT_MIN,
  DPT_MAX,
  DPT_PREMUL_SUM, /* each rank's input times its own factor, then summed */
  DPT_BAND,
  DPT_BOR,
  DPT_BXOR,
  DPT_NO_REDUCE
} dpt_reduce_op;

typedef enum dpt_collective {
  DPT_ALL_REDUCE = 0,
  DPT_ALL_GATHER,
  DPT_REDUCE_SCATTER,
  DPT_BROADCAST,
  DPT_BARRIER,
  DPT_REDUCE,
  DPT_GATHER,
  DPT_SCATTER,
  DPT_ALL_TO_ALL,
  DPT_SEND,
  DPT_RECV
} dpt_collective;

typedef struct dpt_error {
  char message[1024];
} dpt_error;

/* A line of the program that calls an operation. */
typedef struct dpt_place {
  const char* file;
  const char* function;
  int line;
} dpt_place;

/* One operation. Buffers are contiguous; `count` is the elements of one buffer:
 *   all_reduce      inputs[0] -> outputs[0]
 *   reduce          inputs[0] -> outputs[0] of the root; other ranks' outputs[0] keeps its content
 *   all_gather      inputs[0] -> outputs[rank] of every rank
 *   reduce_scatter  inputs[0..size-1], one per receiving rank -> outputs[0]
 *   broadcast       inputs[0] of the root -> outputs[0]
 *   gather          inputs[0] -> outputs[rank] of the root; other ranks have no outputs
 *   scatter         inputs[0..size-1] of the root -> outputs[0]; other ranks have no inputs
 *   all_to_all      inputs[rank] -> outputs[own rank] of that rank
 *   send, recv      inputs[0] of one rank -> outputs[0] of another
 * An input may be the same memory as its output, except in all_to_all. */
typedef struct dpt_request {
  dpt_collective collective;
  dpt_data_type dtype;
  dpt_reduce_op reduce_op;
  double premul_factor; /* with DPT_PREMUL_SUM */
  int root;             /* rank in the group: the root, or the peer of a send or recv; a recv
                             from DPT_ANY_RANK takes the first message with its tag */
  int tag;              /* send and recv: messages are matched by it */
  const void* const* inputs;
  void* const* outputs;
  size_t count;
  /* Elements of each buffer where ranks' parts differ (all_gather: outputs; all_to_all: both);
   * NULL: all have `count`. With all_gather, `count` is this rank's input. */
  const size_t* input_counts;
  const size_t* output_counts;
  int64_t timeout_ms;
  int asynchronous;       /* 0: the caller waits, so it may run in its thread */
  const char* not_native; /* not NULL: why native code can't serve it (device, layout); the
                               buffers may then be NULL */
  void* call;             /* the adapter's own: how to replay it on the delegate; it must
                               live until the operation has ended */
  /* Buffers in the memory of a GPU, as this process numbers them; 0: in the host's. Completed then
   * means that the operation is on the stream. */
  int on_device;
  int device;
  /* Asked for, in the calling thread, once native code will serve the request: a stream of the
   * device (as CUDA's driver names it) on which the buffers are ready. */
  void* (*stream)(void* call);
  /* Asked for, in the calling thread, before the tuner measures on that stream. Not 0: nothing can
   * run there now and come to its end, as while a graph captures the stream, or in an open group of
   * the delegate's operations. NULL: never. */
  int (*busy)(void* call);
  /* In a request of the core's own: each rank's node, of equally many ranks each, where the
   * delegate is to go through them in stages. NULL: it isn't. */
  const int* node_of;
  /* Receives the operation's number, with DPT_DELEGATED for `record_end`. NULL: nobody will tell.
   */
  uint64_t* recorded;
  int* source; /* recv: receives the sender's rank in the group; lives as `call` does;
                    may be NULL */
  /* Who calls it, for the flight record; looked at before `submit` does anything that waits. NULL:
   * not sampled, or told by `record_place` later. */
  const dpt_place* place;
} dpt_request;

#define DPT_ANY_RANK (-1)

/* What became of a submitted request. */
typedef enum dpt_outcome {
  DPT_COMPLETED = 0, /* done, in the caller's thread */
  DPT_STARTED = 1,   /* under way; `done` will be called once */
  DPT_DELEGATED = 2  /* handed to the delegate, whose own handle tells of its end */
} dpt_outcome;

typedef void (*dpt_done)(void* context, dpt_status status, const char* message);

/* An operation on its short way, see dpt_api.begin_known. */
typedef struct dpt_known {
  uint64_t recorded;  /* its number, for `record_end` */
  const int* node_of; /* as start_by_nodes is given it; NULL: as `start` does it */
} dpt_known;

/* Whether what the delegate does on a device may wait for another rank. */
typedef enum dpt_waits {
  DPT_WAITS_NOT = 0,
  DPT_WAITS_ON_STREAM = 1, /* the device has not come yet to where the program's stream was at an
                              earlier question */
  DPT_WAITS_IN_START = 2   /* the program's thread is starting an operation; nothing ends that */
} dpt_waits;

/* The stock backend (gloo, NCCL): one more candidate, and the one that can do everything. `call` is
 * the request's. */
typedef struct dpt_delegate {
  void* context;
  /* Begins the operation in the calling thread, without waiting for its end. */
  dpt_status (*start)(void* context, void* call, dpt_error* error);
  /* Carries it out to its end. */
  dpt_status (*run)(void* context, void* call, dpt_error* error);
  /* Carries out a request of the core's own, where buffers of one kind lie one behind the other:
   * how the tuner times the delegate, and how that gets its part of an operation that is divided.
   * Sums, and of an all_reduce also averages, of floats of 16 and 32 bits. On host memory to its
   * end, with NULL for `call`. On a device the operation is put on the stream that `stream` gave
   * for `call`, and the thread goes on. NULL: the delegate is no candidate, and gets only what
   * native code can't do. */
  dpt_status (*execute)(void* context, const dpt_request* request, dpt_error* error);
  /* As `start`, in stages within nodes and between them: all_reduce, all_gather and reduce_scatter
   * of equal parts. `node_of` is each rank's node, of equally many ranks each. NULL: it can't. */
  dpt_status (*start_by_nodes)(void* context, void* call, const int* node_of, dpt_error* error);
  /* Asked by another thread, again and again once a rank is lost. NULL: it can't tell. */
  dpt_waits (*is_waiting)(void* context);
  /* After a failure that the program hears of by an exception: ends for good, and without waiting
   * for that, what the delegate has on a device. It may wait there for a lost rank without end, and
   * with it the program's streams and whoever fills their queues. From any thread, perhaps more
   * than once. NULL: it can't. */
  void (*abandon)(void* context);
} dpt_delegate;

/* The rendezvous store. `get` waits up to timeout_ms and returns DPT_ERR_TIMEOUT when the key is
 * still absent; `*bytes` is the value's full length, of which at most `capacity` was copied. */
typedef struct dpt_store {
  void* context;
  dpt_status (*set)(
      void* context, const char* key, const void* data, size_t bytes, dpt_error* error);
  dpt_status (*get)(void* context,
                    const char* key,
                    int64_t timeout_ms,
                    void* data,
                    size_t capacity,
                    size_t* bytes,
                    dpt_error* error);
} dpt_store;

typedef struct dpt_comm dpt_comm;

typedef enum dpt_tune {
  DPT_TUNE_OFF = 0,    /* rules of thumb, nothing measured */
  DPT_TUNE_AUTO = 1,   /* the profile, else measured at a size's first use */
  DPT_TUNE_FORCE = 2,  /* measured at a size's first use, whatever the profile says */
  DPT_TUNE_PROFILE = 3 /* the profile, else rules of thumb: two runs decide alike */
} dpt_tune;

typedef struct dpt_comm_options {
  const char* group_name;
  int rank;
  int size;
  const int64_t* global_ranks;       /* `size` of them: what messages call the ranks */
  int native;                        /* 0: delegate everything (collectives=stock) */
  int (*interrupted)(void* context); /* polled while the caller waits; may be NULL */
  void* interrupted_context;
  dpt_tune tune;
  const char* profile;  /* path of the profile to read and write; NULL or empty: none */
  size_t staging_bytes; /* most staging memory of this process, over all groups; 0: the default */
  int raise_errors;     /* 0: a failure on a GPU ends the process; else the next call fails */
  /* Who kept this rank waiting, for the words of a failure that is about to end the process: a
   * sentence of less than `bytes`, empty where nobody can say. Asked by a thread of its own, which
   * is not waited for longer than some seconds. NULL: nobody can. */
  void (*explain)(void* context, const char* failure, char* sentence, size_t bytes);
  void* explain_context;
} dpt_comm_options;

typedef struct dpt_api {
  uint32_t abi_version;
  uint32_t bytes; /* sizeof(dpt_api) in the core */

  /* Waits for nobody: peers meet at the first native operation. Store and delegate are copied;
   * their contexts must outlive the communicator. */
  dpt_status (*comm_create)(const dpt_comm_options* options,
                            const dpt_store* store,
                            const dpt_delegate* delegate,
                            dpt_comm** comm,
                            dpt_error* error);
  /* Waits for operations under way, tells the peers that this rank left, frees. */
  void (*comm_destroy)(dpt_comm* comm);
  /* Every operation under way or to come on this group fails with `reason`, on every rank. */
  void (*comm_abort)(dpt_comm* comm, const char* reason);
  dpt_status (*submit)(dpt_comm* comm,
                       const dpt_request* request,
                       dpt_done done,
                       void* done_context,
                       dpt_outcome* outcome,
                       dpt_error* error);
  /* Registered memory: `bytes` of host memory that local peers can reach without a copy. Aligned to
   * 256 bytes, content undefined; no system call once the pool has grown to the program's need. */
  dpt_status (*memory_allocate)(size_t bytes, void** address, dpt_error* error);
  void (*memory_free)(void* address);
  /* Which capture of a graph a stream (see dpt_request.stream) is part of; 0: none. */
  uint64_t (*stream_capture)(void* stream);
  /* Whether all that was on the stream has ended where this cudaEvent_t, which no graph captured,
   * was recorded. Whatever other threads capture. */
  int (*event_ended)(void* event);
  /* The flight record: a delegated operation has ended; `on_stream`: it only began, on a stream,
   * and nobody will tell of its end. */
  void (*record_end)(uint64_t recorded, dpt_status status, int on_stream);
  /* A short way for what is the delegate's: not 0 if that is settled for operations like `request`,
   * on a device. Then it is recorded and counted, and the caller starts it on the delegate himself,
   * before anything else of this thread on the group, and says with `record_end` or `fail_known`
   * what came of that. 0: submit it. Of the request's buffers, and what is asked for with `call`,
   * nothing is looked at. */
  int (*begin_known)(dpt_comm* comm, const dpt_request* request, dpt_known* begun);
  /* What the delegate failed with, as from `start`. Returns what the caller is to raise: that, or
   * with its own message in `error` why the group had ended. */
  dpt_status (*fail_known)(dpt_comm* comm,
                           const dpt_request* request,
                           const dpt_known* begun,
                           dpt_status status,
                           dpt_error* error);
  /* The same of a list: `begun` says of each whether the caller starts it on the delegate, with all
   * others of which that is said in one piece, flat and not by nodes. All ranks find the same of
   * them. `recorded` gets their numbers. */
  dpt_status (*begin_coalesced)(dpt_comm* comm,
                                const dpt_request* requests,
                                size_t count,
                                uint64_t* recorded,
                                int* begun,
                                dpt_error* error);
  /* The flight record: who called the operation of this number, if it is still there. */
  void (*record_place)(uint64_t recorded, const dpt_place* place);
  /* The same: from here on somebody waits for the operation, or is told when it has ended. */
  void (*record_wait)(uint64_t recorded);
} dpt_api;

#ifdef __cplusplus
}
#endif

#endif /* DEEPYTORCH_H_ */
