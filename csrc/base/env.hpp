// Every environment variable of the native core, read once; getenv appears nowhere else.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "base/log.hpp"

namespace dpt {

struct Env {
  // DEEPYTORCH_LOG: least severe message written to stderr. Default info.
  LogLevel log_level;
  // DEEPYTORCH_CHUNK_BYTES: pipeline step of shared-memory algorithms, a multiple of 64 up to
  // 262144, the same on every rank. Default 0: the tuner's choice.
  size_t chunk_bytes;
  // DEEPYTORCH_IFNAME: the network interfaces that reach the other nodes, separated by commas; all
  // of them are used. Default none: the one that the route to the other nodes takes.
  std::vector<std::string> ifnames;
  // DEEPYTORCH_NUM_SOCKETS: parallel connections between two ranks of different nodes, 1 to 64; the
  // group's rank 0 decides. Default 0: by the number of ranks.
  int num_sockets;
  // DEEPYTORCH_SOCKET_BYTES: size of each connection's buffers, 65536 to 1 GiB. Default 0: the
  // system tunes them.
  size_t socket_bytes;
  // DEEPYTORCH_TCP_CONGESTION: congestion control of those connections. Default empty: the
  // system's.
  std::string tcp_congestion;
  // DEEPYTORCH_TCP_CHECKSUM: 1: messages that this process sends to other nodes carry a checksum.
  // Default 0.
  bool tcp_checksum;
  // DEEPYTORCH_NODE_ID: for tests and emulation: the name of the node that this process pretends to
  // be on. It may list the names for all global ranks, separated by commas. Ranks of different
  // names don't use the memory they could share. Default none: where each process really is.
  std::vector<std::string> node_ids;
  // DEEPYTORCH_EMULATE_LINKS: for tests and emulation: the links between the GPUs of all global
  // ranks, the same text on every rank, as LinkMatrix is written. A link that is not there stays
  // away. Default none: as they are.
  std::string emulated_links;
  // DEEPYTORCH_REDUCE_THREADS: threads of this process that reduce what GPUs without peer access
  // exchange, 1 to 64. Default 0: by the number of cores.
  int reduce_threads;
  // DEEPYTORCH_GPU_CHANNELS: most thread blocks of this process's kernels for one group, 2 to 64;
  // the smallest of all its ranks counts. Default 0: by what other groups have.
  int gpu_channels;
  // NCCL_P2P_DISABLE: 1: GPUs are to be taken as if they had no peer access; for NCCL and for us.
  bool no_peer_access;
  // CUDA_DEVICE_MAX_CONNECTIONS: how many queues the CUDA driver has for streams, 1 to 32; it reads
  // that itself. Default 8, its own; also for what it doesn't take.
  int gpu_queues;
  // DEEPYTORCH_NCCL_TABLE: the file that the tuner plugin for NCCL goes by. Default none.
  std::string nccl_table;
};

const Env& env();

// In place of what the environment says of it, as long as nobody has called env().
void set_variable(const std::string& name, const std::string& value);

}  // namespace dpt
