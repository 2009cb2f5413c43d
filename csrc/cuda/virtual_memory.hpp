// The functions of CUDA's virtual memory management, and memory that other processes can map.
#pragma once

#include "cuda/driver.hpp"

namespace dpt::cuda {

struct VirtualMemory {
  decltype(&::cuMemCreate) create = DPT_DRIVER(cuMemCreate);
  decltype(&::cuMemRelease) release = DPT_DRIVER(cuMemRelease);
  decltype(&::cuMemAddressReserve) reserve = DPT_DRIVER(cuMemAddressReserve);
  decltype(&::cuMemAddressFree) unreserve = DPT_DRIVER(cuMemAddressFree);
  decltype(&::cuMemMap) map = DPT_DRIVER(cuMemMap);
  decltype(&::cuMemUnmap) unmap = DPT_DRIVER(cuMemUnmap);
  decltype(&::cuMemSetAccess) set_access = DPT_DRIVER(cuMemSetAccess);
  decltype(&::cuMemExportToShareableHandle) export_handle =
      DPT_DRIVER(cuMemExportToShareableHandle);
  decltype(&::cuMemImportFromShareableHandle) import_handle =
      DPT_DRIVER(cuMemImportFromShareableHandle);
  decltype(&::cuMemGetAllocationGranularity) granularity =
      DPT_DRIVER(cuMemGetAllocationGranularity);
  decltype(&::cuGetErrorString) error_string = DPT_DRIVER(cuGetErrorString);

  static const VirtualMemory& get() {
    static const VirtualMemory instance;
    return instance;
  }
};

constexpr auto kFileHandle = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

inline CUmemAllocationProp properties_of(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  properties.requestedHandleTypes = kFileHandle;
  return properties;
}

inline CUmemAccessDesc access_of(int device) {
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  return access;
}

}  // namespace dpt::cuda
