// Small all_reduce and reduce_scatter, in one exchange. Every rank sends each peer the part that
// this peer reduces, which is everything in all_reduce. The part goes as lines that carry their own
// flags. Then the rank adds up what comes in. P - 1 times the part on each link, twice that with
// the flags, but a single trip.
//
//   send:    input -> lines of every peer
//   reduce:  own input and the lines of every rank, in rank order -> output
#include "cuda/lines.cuh"
#include "cuda/start.cuh"

namespace dpt::cuda {
namespace {

template <typename T, typename Op>
DPT_KERNEL low_latency_reduce_kernel(DPT_PARAMETER GroupView group,
                                     DPT_PARAMETER CallView call,
                                     DPT_PARAMETER ReduceArguments arguments) {
  const Attendance attendance(group, call);
  const Lines lines(group, call);
  const int size = group.layout.size;
  const int rank = group.rank;
  const Scale scale{arguments.input_factor, arguments.result_factor};
  using HalfReducer = Reducer<T, Op, Half>;

  const uint64_t first = static_cast<uint64_t>(channel_index()) * num_threads() + thread_index();
  const uint64_t stride = static_cast<uint64_t>(num_channels()) * num_threads();
  const uint64_t count = (arguments.bytes + Half::kBytes - 1) / Half::kBytes;
  const auto own = [&](int part, uint64_t i) {
    const uint64_t at = i * Half::kBytes;
    return HalfReducer::scale_input(
        load_user<Half>(arguments.parts[part] + at, arguments.bytes - at), scale);
  };

  bool ok = attendance.is_alive();
  uint64_t line = thread_index();
  for (uint64_t i = first; i < count && ok; i += stride, line += num_threads()) {
    for (int step = 1; step < size; ++step) {
      const int peer = (rank + step) % size;
      lines.send(peer, line, own(peer, i));
    }
  }

  line = thread_index();
  for (uint64_t i = first; i < count && ok; i += stride, line += num_threads()) {
    HalfReducer reducer;
    for (int source = 0; source < size && ok; ++source) {
      Half data;
      if (source == rank) {
        data = own(rank, i);
      } else {
        ok = lines.receive(source, line, &data);
      }
      reducer.add(data);
    }
    const uint64_t at = i * Half::kBytes;
    if (ok) store_user(arguments.output + at, reducer.result(scale), arguments.bytes - at);
  }
  if (attendance.end(ok)) lines.close();
}

}  // namespace

void low_latency_reduce(const Launch& launch,
                        const ReduceArguments& arguments,
                        DataType dtype,
                        ReduceOp op) {
  visit_reduction(dtype, op, [&](auto element, auto operation) {
    start(low_latency_reduce_kernel<decltype(element), decltype(operation)>,
          launch,
          launch.group,
          launch.call,
          arguments);
  });
}

void load_low_latency_reduce() {
  for (const DataType dtype :
       {DPT_FLOAT32, DPT_BFLOAT16, DPT_FLOAT16, DPT_FLOAT64, DPT_INT32, DPT_INT64}) {
    for (const ReduceOp op : {DPT_SUM, DPT_MIN, DPT_MAX}) {
      visit_reduction(dtype, op, [](auto element, auto operation) {
        load(low_latency_reduce_kernel<decltype(element), decltype(operation)>);
      });
    }
  }
}

}  // namespace dpt::cuda
