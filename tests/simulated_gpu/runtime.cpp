// The CUDA runtime's functions, on the devices of device.h. What is exported by the real library and is not here is
// generated (build.py): it ends the process, and says its name.
#include <cuda_runtime_api.h>
#undef cudaGetDeviceProperties

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device.h"

using namespace simulated;

void* driver_function(const char* name);  // driver.cpp

namespace {

thread_local cudaError_t last_error = cudaSuccess;

cudaError_t told(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

Stream* stream(cudaStream_t handle) { return stream_of(handle); }
Event* event(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

bool is_pageable(const void* address) { return !find(address).has_value(); }

// Copies from and to memory of the host that is not pinned are done when the call returns.
cudaError_t copy_on(cudaStream_t handle, void* to, const void* from, std::size_t bytes) {
  make_context();
  if (bytes == 0) return cudaSuccess;
  if (is_pageable(to) || is_pageable(from)) {
    synchronize(stream(handle));
    std::memcpy(to, from, bytes);
  } else {
    enqueue(stream(handle), [=] { std::memmove(to, from, bytes); });
  }
  return cudaSuccess;
}

// --- kernels ---------------------------------------------------------------------------------------------------------

struct Kernels {
  std::mutex mutex;
  std::vector<std::pair<const void*, const char*>> registered;
};
Kernels& kernels() {
  static auto* found = new Kernels();
  return *found;
}

std::string name_of(const void* kernel) {
  std::lock_guard lock(kernels().mutex);
  for (auto [function, name] : kernels().registered) {
    if (function == kernel) return name;
  }
  return "without a name";
}

constexpr double CYCLES_PER_S = 2e9;

cudaError_t launch(const void* kernel, void** arguments, cudaStream_t handle) {
  make_context();
  std::string name = name_of(kernel);
  if (name.find("spin_kernel") != std::string::npos) {
    double seconds = static_cast<double>(*static_cast<std::int64_t*>(arguments[0])) / CYCLES_PER_S;
    enqueue(stream(handle), [=] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }, true);
    return cudaSuccess;
  }
  fail("the kernel " + name + " is launched: no operator of torch that is computed on the CPU does that");
}

}  // namespace

extern "C" {

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*, void*, int*) {
  std::lock_guard lock(kernels().mutex);
  kernels().registered.emplace_back(function, name);
}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments, std::size_t, cudaStream_t handle) {
  return launch(kernel, arguments, handle);
}
struct Configuration {
  dim3 grid, block;
  std::size_t shared;
  void* stream;
};
static thread_local Configuration configuration;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, void* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<void**>(stream) = configuration.stream;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void** arguments, std::size_t, cudaStream_t handle) {
  return launch(kernel, arguments, handle);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* how, const void* kernel, void** arguments) {
  return launch(kernel, arguments, how->stream);
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

// --- devices ---

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = num_visible();
  return *count > 0 ? cudaSuccess : told(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= num_visible()) return told(cudaErrorInvalidDevice);
  set_device(device);
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device < 0 || device >= num_visible()) return told(cudaErrorInvalidDevice);
  std::memset(properties, 0, sizeof *properties);
  std::snprintf(properties->name, sizeof properties->name, "%s", NAME);
  std::memcpy(&properties->uuid, uuid(physical(device)).data(), sizeof properties->uuid);
  properties->pciBusID = physical(device);
  properties->major = COMPUTE_CAPABILITY;
  properties->totalGlobalMem = settings().memory;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = 52428800;
  properties->unifiedAddressing = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = COMPUTE_CAPABILITY; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrPciBusId: *value = physical(device); break;
    case cudaDevAttrConcurrentManagedAccess: *value = 0; break;
    case cudaDevAttrPageableMemoryAccess: *value = 0; break;
    default: fail("the device's attribute " + std::to_string(attribute) + " is asked for, which has no value here");
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int device) {
  std::snprintf(id, static_cast<std::size_t>(size), "0000:%02x:00.0", physical(device));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = settings().has_peers && device != peer;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return settings().has_peers ? cudaSuccess : told(cudaErrorPeerAccessUnsupported);
}
cudaError_t cudaDeviceSynchronize() {
  make_context();
  synchronize_device(current_device());
  return cudaSuccess;
}
cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// --- errors ---

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorNotReady: return "cudaErrorNotReady";
    case cudaErrorNoDevice: return "cudaErrorNoDevice";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    case cudaErrorPeerAccessUnsupported: return "cudaErrorPeerAccessUnsupported";
    default: return "cudaError";
  }
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : cudaGetErrorName(error);
}

// --- memory ---

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  make_context();
  *address = allocate(current_device(), bytes);
  return *address == nullptr ? told(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  make_context();
  if (address == nullptr) return cudaSuccess;
  for (int device = 0; device < num_visible(); device++) synchronize_device(device);
  return release(address) ? cudaSuccess : told(cudaErrorInvalidValue);
}
cudaError_t cudaHostAlloc(void** address, std::size_t bytes, unsigned) {
  make_context();
  *address = allocate_pinned(bytes);
  return *address == nullptr ? told(cudaErrorMemoryAllocation) : cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
  if (address == nullptr) return cudaSuccess;
  for (int device = 0; device < num_visible(); device++) synchronize_device(device);
  auto found = find(address);
  if (!found || !release(address)) return told(cudaErrorInvalidValue);
  unmap(found->base, found->bytes);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void* address, std::size_t bytes, unsigned) {
  make_context();
  if (find(address)) return told(cudaErrorHostMemoryAlreadyRegistered);
  register_pinned(static_cast<char*>(address), bytes);
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
  return release(address) ? cudaSuccess : told(cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  make_context();
  *total = settings().memory;
  *free = *total - std::min(*total, bytes_used_of(physical(current_device())));
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {};
  auto found = find(address);
  attributes->type = !found                          ? cudaMemoryTypeUnregistered
                     : found->kind == Kind::pinned ? cudaMemoryTypeHost
                                                   : cudaMemoryTypeDevice;
  attributes->device = found ? found->device : 0;
  attributes->devicePointer = found ? const_cast<void*>(address) : nullptr;
  attributes->hostPointer = found && found->kind == Kind::pinned ? const_cast<void*>(address) : nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  make_context();
  synchronize(stream_of(nullptr));
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t handle) {
  return copy_on(handle, to, from, bytes);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, std::size_t bytes, cudaStream_t handle) {
  return copy_on(handle, to, from, bytes);
}
cudaError_t cudaMemset(void* at, int value, std::size_t bytes) {
  make_context();
  synchronize(stream_of(nullptr));
  std::memset(at, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* at, int value, std::size_t bytes, cudaStream_t handle) {
  make_context();
  enqueue(stream(handle), [=] { std::memset(at, value, bytes); });
  return cudaSuccess;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = reinterpret_cast<cudaMemPool_t>(static_cast<std::intptr_t>(device) + 1);
  return cudaSuccess;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return cudaSuccess; }

// --- streams and events ---

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int) {
  make_context();
  *handle = reinterpret_cast<cudaStream_t>(new_stream(current_device()));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t handle) { return is_idle(stream(handle)) ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  make_context();
  synchronize(stream(handle));
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t awaited, unsigned) {
  wait(stream(handle), event(awaited));
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*, const cudaGraphNode_t**,
    const cudaGraphEdgeData**, std::size_t*) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* argument) {
  enqueue(stream(handle), [=] { function(argument); });
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* argument, unsigned) {
  enqueue(stream(handle), [=] { function(handle, cudaSuccess, argument); });
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned) {
  make_context();
  *made = reinterpret_cast<cudaEvent_t>(new_event());
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* made) { return cudaEventCreateWithFlags(made, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  delete_event(event(handle));
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t on) {
  record(event(handle), stream(on));
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t on, unsigned) { return cudaEventRecord(handle, on); }
cudaError_t cudaEventQuery(cudaEvent_t handle) { return is_done(event(handle)) ? cudaSuccess : cudaErrorNotReady; }
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  synchronize(event(handle));
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* found, cudaEvent_t from, cudaEvent_t to) {
  if (!is_done(event(from)) || !is_done(event(to))) return cudaErrorNotReady;
  *found = static_cast<float>(milliseconds(event(from), event(to)));
  return cudaSuccess;
}

// --- the driver's functions ---

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
  *function = driver_function(name);
  if (found != nullptr) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- for operators.cpp and the hook ---

void simulated_gpu_synchronize(int device, void* handle) { synchronize(stream_of(handle, device)); }
int simulated_gpu_is_late() { return settings().is_late; }
void simulated_gpu_enqueue(int device, void* handle, void (*work)(void*), void* argument) {
  enqueue(stream_of(handle, device), [=] { work(argument); });
}
}
