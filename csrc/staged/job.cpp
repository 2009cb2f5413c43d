#include "staged/job.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "host/reduce.hpp"
#include "staged/internode/internode_sender.hpp"

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
  mix(request.count);
  mix(job.piece_bytes);
  mix(job.chunk_bytes);
  mix(static_cast<uint64_t>(job.kind));
  mix(static_cast<uint64_t>(job.threads));
  return hash;
}

}  // namespace

std::string Job::why_not(const Wish& wish) {
  const auto none = [](const std::string& what) { return "CPU-Reduce has no " + what; };
  switch (wish.collective) {
    case DPT_ALL_REDUCE:
    case DPT_REDUCE_SCATTER:
      if (can_reduce(wish.dtype, wish.op)) return "";
      return none(std::string(name_of(wish.op)) + " of " + name_of(wish.dtype));
    case DPT_BROADCAST:
      if (wish.nodes) return none(std::string(name_of(wish.collective)) + " between nodes");
      [[fallthrough]];
    case DPT_ALL_GATHER:
      return wish.even ? "" : "CPU-Reduce takes parts of one size only";
    default:
      return none(name_of(wish.collective));
  }
}

// Sums of what models are trained in; the rest is rare in training, and kernels cost space.
bool Job::adds_on_device(Collective collective, DataType dtype, ReduceOp op) {
  const bool pays = collective == DPT_REDUCE_SCATTER || collective == DPT_ALL_REDUCE;
  const bool floats = dtype == DPT_FLOAT32 || dtype == DPT_BFLOAT16 || dtype == DPT_FLOAT16;
  return pays && floats && (op == DPT_SUM || op == DPT_AVG);
}

namespace {

Job one_job(const dpt_request& request,
            const Cut& cut,
            const Membership& ranks,
            const Shape& shape) {
  using Kind = Job::Kind;
  const NodeLayout& layout = ranks.layout;
  const int rank = ranks.rank;
  const bool travels = shape.nodes > 1;
  Job job{};
  job.dtype = request.dtype;
  job.op = request.reduce_op;
  job.factor = request.reduce_op == DPT_PREMUL_SUM ? request.premul_factor : 1;
  job.piece_bytes = request.count * size_of(request.dtype);
  job.num_pieces = 1;
  const bool on_device = cut.threads == 0 && !travels &&
                         Job::adds_on_device(request.collective, job.dtype, job.op) &&
                         (request.collective != DPT_ALL_REDUCE || shape.ranks == 2);
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
        job.downloads = {{Job::kResult, 0, output(0)}};
      }
      break;
    case DPT_REDUCE_SCATTER:
      job.kind = reduces;
      for (const std::vector<int>& node : layout.ranks) {
        for (const int to : node) {
          // Then its own part stays where it is, and slots are without their rank's.
          if (on_device && to == rank) continue;
          if (to == rank) job.downloads = {{Job::kResult, job.pieces.size(), output(0)}};
          job.pieces.push_back(input(to));
          if (!on_device) continue;
          job.downloads.push_back({to, static_cast<size_t>(rank - (rank > to ? 1 : 0)), nullptr});
        }
      }
      job.num_pieces = job.pieces.size();
      if (on_device) {
        job.own = input(rank);
        job.own_to = output(0);
      }
      break;
    case DPT_ALL_GATHER:
      job.kind = Kind::kExchange;
      job.pieces = {input(0)};
      job.first_piece = ranks.node();
      job.num_pieces = shape.nodes;
      for (int step = 0; step < shape.ranks; ++step) {
        const int from = (ranks.local() + step) % shape.ranks;  // not all from one at a time
        for (int node = 0; node < shape.nodes; ++node) {
          const int origin = layout.ranks[node][from];
          const bool travelled = node != ranks.node();
          if (origin == rank) continue;
          job.downloads.push_back({from, static_cast<size_t>(node), output(origin), travelled});
        }
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
                  Job::why_not({request.collective, request.dtype, request.reduce_op}));
  }
  if (travels) plan_travel(&job, request.collective, ranks);
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
  return job;
}

// Every rank adds up its part of the whole and then gets the others'. What can't be divided, fewer
// elements than ranks, workers reduce.
std::vector<Job> scatter_and_gather(const dpt_request& request,
                                    const Cut& cut,
                                    const Membership& ranks,
                                    const Shape& shape) {
  const auto size = static_cast<size_t>(shape.ranks);
  const size_t count = request.count / size;
  const size_t part = count * size_of(request.dtype);
  const auto* const input = static_cast<const char*>(request.inputs[0]);
  auto* const output = static_cast<char*>(request.outputs[0]);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (size_t rank = 0; rank < size; ++rank) {
    inputs.push_back(input + rank * part);
    outputs.push_back(output + rank * part);
  }
  void* own = outputs[ranks.rank];
  const void* const added = own;
  std::vector<Job> jobs;
  if (request.count % size != 0) {
    const void* const rest = input + size * part;
    void* const to = output + size * part;
    dpt_request of_rest = request;
    of_rest.count = request.count % size;
    of_rest.inputs = &rest;
    of_rest.outputs = &to;
    jobs.push_back(one_job(of_rest, cut, ranks, shape));
  }
  if (count == 0) return jobs;
  dpt_request half = request;
  half.count = count;
  half.collective = DPT_REDUCE_SCATTER;
  half.inputs = inputs.data();
  half.outputs = &own;
  jobs.push_back(one_job(half, cut, ranks, shape));
  half.collective = DPT_ALL_GATHER;
  half.reduce_op = DPT_NO_REDUCE;
  half.inputs = &added;
  half.outputs = outputs.data();
  jobs.push_back(one_job(half, cut, ranks, shape));
  return jobs;
}

}  // namespace

std::vector<Job> Job::of(const dpt_request& request,
                         const Cut& cut,
                         const Membership& ranks,
                         const Shape& shape) {
  const bool in_parts = cut.threads == 0 && request.collective == DPT_ALL_REDUCE &&
                        shape.ranks > 2 && shape.nodes == 1 && !shape.on_devices &&
                        adds_on_device(request.collective, request.dtype, request.reduce_op);
  std::vector<Job> jobs = in_parts ? scatter_and_gather(request, cut, ranks, shape)
                                   : std::vector{one_job(request, cut, ranks, shape)};
  if (jobs.empty()) jobs.push_back(one_job(request, cut, ranks, shape));  // of no elements
  // All parts say what operation they are of.
  for (Job& job : jobs) job.description = describe(request, job);
  return jobs;
}

}  // namespace dpt::staged
