#include "comm/hybrid.hpp"

#include "base/error.hpp"
#include "comm/lost_rank.hpp"

namespace dpt {
namespace {

// Both parts begin where copies and vectors do best.
constexpr size_t kAlignment = 4096;

size_t first_of_delegates(const dpt_request& request, int percent) {
  const size_t element = size_of(request.dtype);
  const size_t own = request.count * element / 100 * static_cast<size_t>(100 - percent);
  return own / kAlignment * kAlignment / element;
}

}  // namespace

dpt_status WatchedDelegate::execute(const dpt_request& request, dpt_error* error) const {
  before_delegate(segment);
  return after_delegate(segment, delegate->execute(delegate->context, &request, error), *error);
}

void launch_divided(DeviceGroup& group, const WatchedDelegate& delegate, const Divided& divided) {
  const auto& [request, plan, stream, failed] = divided;
  if (plan.delegated == 0) return group.launch(request, plan, stream, {.failed = failed});
  DPT_CHECK(request.collective == DPT_ALL_REDUCE);
  dpt_request own = request;
  own.count = first_of_delegates(request, plan.delegated);
  dpt_request rest = request;
  rest.count = request.count - own.count;
  const size_t offset = own.count * size_of(request.dtype);
  const void* const input = static_cast<const char*>(request.inputs[0]) + offset;
  void* const output = static_cast<char*>(request.outputs[0]) + offset;
  rest.inputs = &input;
  rest.outputs = &output;
  const auto beside = [&] {
    dpt_error error{};
    const dpt_status status = delegate.execute(rest, &error);
    if (status != DPT_OK) throw Error(status, error.message);
  };
  group.launch(own, plan, stream, {beside, failed});
}

}  // namespace dpt
