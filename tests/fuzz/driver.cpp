// libFuzzer's entry for one target: -DDPT_FUZZ_TARGET=json.
#include "targets.hpp"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return dpt::fuzz::DPT_FUZZ_TARGET(data, size);
}
