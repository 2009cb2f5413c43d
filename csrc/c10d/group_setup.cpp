#include "group_setup.hpp"

#include <ATen/record_function.h>

#include "convert.hpp"

namespace dpt::c10d_adapter {

std::string GroupSetup::profiled_as(const char* title, at::DeviceType device) const {
  if (!at::hasCallbacks()) return "";
  const char* const stock_name = device == at::kCPU ? "gloo" : "nccl";
  return join_text({own_name ? "deepytorch" : stock_name, ":", title});
}

}  // namespace dpt::c10d_adapter
