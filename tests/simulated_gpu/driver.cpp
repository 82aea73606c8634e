// The CUDA driver's functions that torch, vLLM and Tandem call, on the devices of device.h.
#include <cuda.h>

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "device.h"

using namespace simulated;

namespace {

constexpr std::size_t GRANULARITY = 2u << 20;

struct Physical {  // what cuMemCreate makes
  int device;
  std::size_t offset, bytes;
  int num_uses;
};

std::mutex mutex;
std::map<char*, std::pair<std::size_t, Physical*>>& mappings() {
  static auto* found = new std::map<char*, std::pair<std::size_t, Physical*>>();
  return *found;
}

void let_go(Physical* physical) {
  if (--physical->num_uses > 0) return;
  give(physical->device, physical->offset, physical->bytes);
  delete physical;
}

// Functions that somebody asks for by name and that are not here: as many as there may be, each knows its name.
constexpr std::size_t MOST_MISSING = 256;
std::array<std::string, MOST_MISSING>& missing_names() {
  static auto* found = new std::array<std::string, MOST_MISSING>();
  return *found;
}
template <std::size_t number>
void not_provided() {
  missing(missing_names()[number].c_str());
}
template <std::size_t... numbers>
constexpr std::array<void (*)(), sizeof...(numbers)> all_missing(std::index_sequence<numbers...>) {
  return {&not_provided<numbers>...};
}

}  // namespace

#undef cuMemGetAddressRange
#undef cuIpcOpenMemHandle
#undef cuStreamWriteValue32

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult error, const char** name) {
  switch (error) {
    case CUDA_SUCCESS: *name = "CUDA_SUCCESS"; break;
    case CUDA_ERROR_INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case CUDA_ERROR_INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case CUDA_ERROR_INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; break;
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: *name = "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"; break;
    default: *name = "CUDA_ERROR"; break;
  }
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) { return cuGetErrorName(error, text); }

// --- devices and contexts: a device has one context, its primary ---

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal < 0 || ordinal >= num_visible()) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
  *count = num_visible();
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = COMPUTE_CAPABILITY; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: *value = 0; break;
    default: fail("the device's attribute " + std::to_string(attribute) + " is asked for, which has no value here");
  }
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = reinterpret_cast<CUcontext>(static_cast<std::intptr_t>(device) + 1);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = has_context() ? reinterpret_cast<CUcontext>(static_cast<std::intptr_t>(current_device()) + 1) : nullptr;
  return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) {
  if (context != nullptr) set_device(static_cast<int>(reinterpret_cast<std::intptr_t>(context)) - 1);
  return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
  if (!has_context()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = current_device();
  return CUDA_SUCCESS;
}

// --- memory of one process that another opens ---

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, std::size_t* bytes, CUdeviceptr address) {
  if (!has_context()) return CUDA_ERROR_INVALID_CONTEXT;
  auto found = find(reinterpret_cast<void*>(address));
  if (!found || found->kind == Kind::pinned) return CUDA_ERROR_INVALID_VALUE;
  if (base != nullptr) *base = reinterpret_cast<CUdeviceptr>(found->base);
  if (bytes != nullptr) *bytes = found->bytes;
  return CUDA_SUCCESS;
}
CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  if (!has_context()) return CUDA_ERROR_INVALID_CONTEXT;
  auto found = find(reinterpret_cast<void*>(address));
  if (!found || found->kind != Kind::device || found->base != reinterpret_cast<char*>(address)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  {
    std::lock_guard lock(mutex);
    if (mappings().count(found->base) != 0) return CUDA_ERROR_INVALID_VALUE;  // as of memory of cuMemCreate
  }
  Handle exported = export_memory(*found);
  std::memcpy(handle, &exported, sizeof exported);
  return CUDA_SUCCESS;
}
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned) {
  if (!has_context()) return CUDA_ERROR_INVALID_CONTEXT;
  Handle exported;
  std::memcpy(&exported, &handle, sizeof exported);
  if (exported.physical != physical(current_device()) && !settings().has_peers) {
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  }
  char* at = import_memory(exported, current_device());
  if (at == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *address = reinterpret_cast<CUdeviceptr>(at);
  return CUDA_SUCCESS;
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
  if (!has_context()) return CUDA_ERROR_INVALID_CONTEXT;
  synchronize_device(current_device());
  return release(reinterpret_cast<void*>(address)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
  auto found = find(reinterpret_cast<void*>(address));
  if (!found) return CUDA_ERROR_INVALID_VALUE;
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) {
    *static_cast<int*>(value) = found->device;
  } else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *static_cast<CUdeviceptr*>(value) = address;
  } else {
    fail("the pointer's attribute " + std::to_string(attribute) + " is asked for, which has no value here");
  }
  return CUDA_SUCCESS;
}

// --- memory whose addresses are reserved apart: expandable segments, vLLM's sleep ---

CUresult cuMemGetAllocationGranularity(std::size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = GRANULARITY;
  return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
  *address = reinterpret_cast<CUdeviceptr>(reserve(bytes));
  return *address == 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr, std::size_t) { return CUDA_SUCCESS; }  // they stay nobody's: see `unmap`
CUresult cuMemCreate(
    CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp* how, unsigned long long) {
  auto offset = take(how->location.id, bytes);
  if (!offset) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{how->location.id, *offset, bytes, 1});
  return CUDA_SUCCESS;
}
CUresult cuMemMap(
    CUdeviceptr address, std::size_t bytes, std::size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  auto* physical = reinterpret_cast<Physical*>(handle);
  char* at = reinterpret_cast<char*>(address);
  if (!map(at, bytes, physical->device, physical->offset + offset)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard lock(mutex);
  physical->num_uses++;
  mappings()[at] = {bytes, physical};
  note({at, bytes, physical->device, Kind::device, physical->offset + offset});
  return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t) { return CUDA_SUCCESS; }
CUresult cuMemUnmap(CUdeviceptr address, std::size_t bytes) {
  std::lock_guard lock(mutex);
  char* first = reinterpret_cast<char*>(address);
  for (auto each = mappings().lower_bound(first); each != mappings().end() && each->first < first + bytes;) {
    forget(each->first);
    unmap(each->first, each->second.first);
    let_go(each->second.second);
    each = mappings().erase(each);
  }
  return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard lock(mutex);
  let_go(reinterpret_cast<Physical*>(handle));
  return CUDA_SUCCESS;
}
CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, std::size_t count, CUstream stream) {
  enqueue(stream_of(stream), [=] {
    for (std::size_t index = 0; index < count; index++) reinterpret_cast<unsigned*>(address)[index] = value;
  });
  return CUDA_SUCCESS;
}
}

void* driver_function(const char* name) {
  static const std::map<std::string, void*> provided = {
#define PROVIDED(function, symbol) {#function, reinterpret_cast<void*>(&symbol)}
      PROVIDED(cuInit, cuInit),
      PROVIDED(cuDriverGetVersion, cuDriverGetVersion),
      PROVIDED(cuGetErrorName, cuGetErrorName),
      PROVIDED(cuGetErrorString, cuGetErrorString),
      PROVIDED(cuDeviceGet, cuDeviceGet),
      PROVIDED(cuDeviceGetCount, cuDeviceGetCount),
      PROVIDED(cuDeviceGetAttribute, cuDeviceGetAttribute),
      PROVIDED(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState),
      PROVIDED(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain),
      PROVIDED(cuCtxGetCurrent, cuCtxGetCurrent),
      PROVIDED(cuCtxSetCurrent, cuCtxSetCurrent),
      PROVIDED(cuCtxGetDevice, cuCtxGetDevice),
      PROVIDED(cuMemGetAddressRange, cuMemGetAddressRange_v2),
      PROVIDED(cuIpcGetMemHandle, cuIpcGetMemHandle),
      PROVIDED(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2),
      PROVIDED(cuIpcCloseMemHandle, cuIpcCloseMemHandle),
      PROVIDED(cuPointerGetAttribute, cuPointerGetAttribute),
      PROVIDED(cuMemGetAllocationGranularity, cuMemGetAllocationGranularity),
      PROVIDED(cuMemAddressReserve, cuMemAddressReserve),
      PROVIDED(cuMemAddressFree, cuMemAddressFree),
      PROVIDED(cuMemCreate, cuMemCreate),
      PROVIDED(cuMemMap, cuMemMap),
      PROVIDED(cuMemSetAccess, cuMemSetAccess),
      PROVIDED(cuMemUnmap, cuMemUnmap),
      PROVIDED(cuMemRelease, cuMemRelease),
      PROVIDED(cuMemsetD32Async, cuMemsetD32Async),
#undef PROVIDED
  };
  if (auto found = provided.find(name); found != provided.end()) return found->second;
  static const auto functions = all_missing(std::make_index_sequence<MOST_MISSING>());
  static std::size_t num_missing = 0;
  std::lock_guard lock(mutex);
  for (std::size_t number = 0; number < num_missing; number++) {
    if (missing_names()[number] == name) return reinterpret_cast<void*>(functions[number]);
  }
  if (num_missing == MOST_MISSING) fail("too many functions of the driver are asked for");
  missing_names()[num_missing] = name;
  return reinterpret_cast<void*>(functions[num_missing++]);
}

extern "C" CUresult cuGetProcAddress_v2(
    const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
  *function = driver_function(name);
  if (found != nullptr) *found = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}
