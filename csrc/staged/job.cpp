#include "staged/job.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "host/reduce.hpp"

namespace dpt::staged {
namespace {

// More chunks than this fill the device's queue of commands, which would hold up the caller.
constexpr size_t kMostChunks = 256;

// Ranks that are in the same operation get the same.
uint32_t describe(const dpt_request& request, const Job& job) {
  uint32_t hash = 2166136261u;  // FNV-1a
  const auto mix = [&](uint64_t value) {
    for (int byte = 0; byte < 8; ++byte) {
      hash = (hash ^ static_cast<uint32_t>(value >> 8 * byte & 255)) * 16777619u;
    }
  };
  mix(request.collective);
  mix(request.dtype);
  mix(request.reduce_op);
  mix(static_cast<uint64_t>(request.root));
  mix(job.piece_bytes);
  mix(job.chunk_bytes);
  mix(static_cast<uint64_t>(job.kind));
  mix(static_cast<uint64_t>(job.threads));
  return hash;
}

}  // namespace

std::string Job::why_not(Collective collective, DataType dtype, ReduceOp op, bool even) {
  switch (collective) {
    case DPT_ALL_REDUCE:
    case DPT_REDUCE_SCATTER:
      if (can_reduce(dtype, op)) return "";
      return std::string("CPU-Reduce has no ") + name_of(op) + " of " + name_of(dtype);
    case DPT_ALL_GATHER:
    case DPT_BROADCAST:
      return even ? "" : "CPU-Reduce takes parts of one size only";
    default:
      return std::string("CPU-Reduce has no ") + name_of(collective);
  }
}

// Sums of what models are trained in; the rest is rare in training, and kernels cost space.
bool Job::adds_on_device(Collective collective, DataType dtype, ReduceOp op, int ranks) {
  const bool pays =
      collective == DPT_REDUCE_SCATTER || (collective == DPT_ALL_REDUCE && ranks == 2);
  const bool floats = dtype == DPT_FLOAT32 || dtype == DPT_BFLOAT16 || dtype == DPT_FLOAT16;
  return pays && floats && (op == DPT_SUM || op == DPT_AVG);
}

Job Job::of(const dpt_request& request, const Cut& cut, int rank, const Shape& shape) {
  Job job{};
  job.dtype = request.dtype;
  job.op = request.reduce_op;
  job.factor = request.reduce_op == DPT_PREMUL_SUM ? request.premul_factor : 1;
  job.piece_bytes = request.count * size_of(request.dtype);
  job.num_pieces = 1;
  const bool on_device =
      cut.threads == 0 && adds_on_device(request.collective, job.dtype, job.op, shape.ranks);
  const Kind reduces = on_device ? Kind::kReduceOnDevice : Kind::kReduce;
  const auto input = [&](int index) { return static_cast<const char*>(request.inputs[index]); };
  const auto output = [&](int index) { return static_cast<char*>(request.outputs[index]); };
  switch (request.collective) {
    case DPT_ALL_REDUCE:
      job.kind = reduces;
      job.pieces = {input(0)};
      if (on_device) {
        job.downloads = {{1 - rank, 0, nullptr}};
        job.own = input(0);
        job.own_to = output(0);
      } else {
        job.downloads = {{kResult, 0, output(0)}};
      }
      break;
    case DPT_REDUCE_SCATTER:
      job.kind = reduces;
      for (int to = 0; to < shape.ranks; ++to) {
        // Then its own part stays where it is, and slots are without their rank's.
        if (on_device && to == rank) continue;
        job.pieces.push_back(input(to));
        if (!on_device) continue;
        job.downloads.push_back({to, static_cast<size_t>(rank - (rank > to ? 1 : 0)), nullptr});
      }
      job.num_pieces = job.pieces.size();
      if (on_device) {
        job.own = input(rank);
        job.own_to = output(0);
      } else {
        job.downloads = {{kResult, static_cast<size_t>(rank), output(0)}};
      }
      break;
    case DPT_ALL_GATHER:
      job.kind = Kind::kExchange;
      job.pieces = {input(0)};
      for (int step = 1; step < shape.ranks; ++step) {
        const int from = (rank + step) % shape.ranks;  // not all from one at a time
        job.downloads.push_back({from, 0, output(from)});
      }
      job.own = input(0);
      job.own_to = output(rank);
      break;
    case DPT_BROADCAST:
      job.kind = Kind::kExchange;
      if (request.root == rank) {
        job.pieces = {input(0)};
        job.own = input(0);
        job.own_to = output(0);
      } else {
        job.downloads = {{request.root, 0, output(0)}};
      }
      break;
    default:
      throw Error(DPT_ERR_INTERNAL,
                  why_not(request.collective, request.dtype, request.reduce_op, true));
  }
  const size_t slot = shape.slot_bytes;
  const size_t wanted = cut.chunk_bytes != 0 ? std::min(cut.chunk_bytes, slot) : slot;
  const size_t whole = job.piece_bytes * job.num_pieces;
  const size_t least = (whole + kMostChunks - 1) / kMostChunks;
  const size_t of_slot = std::min(std::max(wanted, least), slot);
  // Whole cache lines, so that a piece's part of a slot is one, too.
  job.chunk_bytes = std::max(of_slot / job.num_pieces / kCacheLine * kCacheLine, kCacheLine);
  job.chunks = std::max<size_t>((job.piece_bytes + job.chunk_bytes - 1) / job.chunk_bytes, 1);
  const int threads = cut.threads == 0 ? shape.threads : std::min(cut.threads, shape.threads);
  job.threads = job.kind == Kind::kReduce ? threads : 0;
  job.description = describe(request, job);
  return job;
}

}  // namespace dpt::staged
