// Small all_gather, all_to_all, broadcast, gather and scatter: parts travel as lines that carry
// their own flags, in a single trip.
//
//   send:     each peer's part -> lines of that peer
//   own:      this rank's own part is copied
//   receive:  lines of each peer -> output
#include "cuda/lines.cuh"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

DPT_DEVICE uint64_t num_lines(uint64_t bytes) { return (bytes + Half::kBytes - 1) / Half::kBytes; }

DPT_KERNEL low_latency_exchange_kernel(DPT_PARAMETER GroupView group,
                                       DPT_PARAMETER CallView call,
                                       DPT_PARAMETER ExchangeArguments arguments) {
  const Attendance attendance(group, call);
  const Lines lines(group, call);
  const int size = group.layout.size;
  const int rank = group.rank;
  const uint64_t first = static_cast<uint64_t>(channel_index()) * num_threads() + thread_index();
  const uint64_t stride = static_cast<uint64_t>(num_channels()) * num_threads();
  const auto load = [&](int part, uint64_t i) {
    const uint64_t at = i * Half::kBytes;
    return load_user<Half>(arguments.send[part] + at, arguments.send_bytes[part] - at);
  };
  const auto store = [&](int part, uint64_t i, const Half& data) {
    const uint64_t at = i * Half::kBytes;
    store_user(arguments.receive[part] + at, data, arguments.receive_bytes[part] - at);
  };

  bool ok = attendance.is_alive();
  for (int step = 1; step < size && ok; ++step) {
    const int peer = (rank + step) % size;
    const uint64_t count = num_lines(arguments.send_bytes[peer]);
    uint64_t line = thread_index();
    for (uint64_t i = first; i < count; i += stride, line += num_threads()) {
      lines.send(peer, line, load(peer, i));
    }
  }

  if (arguments.send[rank] != arguments.receive[rank]) {
    const uint64_t count = num_lines(arguments.receive_bytes[rank]);
    for (uint64_t i = first; i < count; i += stride) store(rank, i, load(rank, i));
  }

  for (int step = 1; step < size; ++step) {
    const int peer = (rank + size - step) % size;
    const uint64_t count = num_lines(arguments.receive_bytes[peer]);
    uint64_t line = thread_index();
    for (uint64_t i = first; i < count && ok; i += stride, line += num_threads()) {
      Half data;
      ok = lines.receive(peer, line, &data);
      if (ok) store(peer, i, data);
    }
  }
  if (attendance.end(ok)) lines.close();
}

}  // namespace

void low_latency_exchange(const Launch& launch, const ExchangeArguments& arguments) {
  start(low_latency_exchange_kernel, launch, launch.group, launch.call, arguments);
}

void load_low_latency_exchange() { load(low_latency_exchange_kernel); }

}  // namespace dpt::cuda
