// Every thread adds up vectors of its own, in rank order. It reads this rank's where the caller has
// them, and the others' where the copy engine put them.
#include "cuda/start.cuh"
#include "cuda/sum_pieces.hpp"

namespace dpt::cuda {
namespace {

template <typename T>
DPT_KERNEL sum_pieces_kernel(DPT_PARAMETER staged::Pieces pieces) {
  const Scale scale{1, pieces.op == DPT_AVG ? 1.0 / pieces.ranks : 1.0};
  const uint64_t stride = static_cast<uint64_t>(num_channels()) * num_threads() * Vector::kBytes;
  const uint64_t first = static_cast<uint64_t>(channel_index()) * num_threads() + thread_index();
  for (uint64_t at = first * Vector::kBytes; at < pieces.bytes; at += stride) {
    Reducer<T, Sum, Vector> sum;
    const char* other = pieces.others + at;
    for (int rank = 0; rank < pieces.ranks; ++rank) {
      if (rank == pieces.rank) {
        sum.add(load_user<Vector>(pieces.own + at, pieces.bytes - at));
      } else {
        sum.add(*reinterpret_cast<const Vector*>(other));
        other += pieces.pitch;
      }
    }
    store_user(pieces.to + at, sum.result(scale), pieces.bytes - at);
  }
}

}  // namespace

void sum_pieces(const staged::Pieces& pieces, Stream stream, Grid grid) {
  const bool found = visit_large_dtype(pieces.dtype, [&](auto element) {
    start(sum_pieces_kernel<decltype(element)>, Launch{{}, {}, grid, stream, 0}, pieces);
  });
  DPT_CHECK(found);
}

void load_sum_pieces() {
  for (const DataType dtype : {DPT_FLOAT32, DPT_BFLOAT16, DPT_FLOAT16}) {
    visit_large_dtype(dtype, [](auto element) { load(sum_pieces_kernel<decltype(element)>); });
  }
}

}  // namespace dpt::cuda
