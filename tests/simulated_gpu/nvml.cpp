// What NVIDIA's management library says of the devices of device.h: all of the machine, whichever are visible.
// What is asked for and is not here, callers find missing, as in a driver that is older than they are.
#include <cstdio>
#include <cstring>
#include <string>

#include "device.h"

using namespace simulated;

namespace {

enum Result { success = 0, invalid_argument = 2, not_supported = 3, not_found = 6, insufficient_size = 7 };

// A device's handle is its number and one, so that none is null.
void* handle_of(unsigned index) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(index) + 1); }
unsigned index_of(void* handle) { return static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(handle)) - 1; }

Result write(char* to, unsigned size, const std::string& text) {
  if (size <= text.size()) return insufficient_size;
  std::memcpy(to, text.c_str(), text.size() + 1);
  return success;
}

std::string uuid_of(unsigned index) {
  std::string text = "GPU-";
  std::string bytes = uuid(static_cast<int>(index));
  for (std::size_t each = 0; each < bytes.size(); each++) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned char>(bytes[each]));
    if (each == 4 || each == 6 || each == 8 || each == 10) text += "-";
    text += hex;
  }
  return text;
}

}  // namespace

extern "C" {

struct Memory {
  unsigned long long total, free, used;
};
struct Memory_v2 {
  unsigned version;
  unsigned long long total, reserved, free, used;
};
struct Pci {
  char legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
};

Result nvmlInit_v2() { return success; }
Result nvmlInit() { return success; }
Result nvmlInitWithFlags(unsigned) { return success; }
Result nvmlShutdown() { return success; }
const char* nvmlErrorString(Result result) { return result == success ? "Success" : "an error of the simulated NVML"; }
Result nvmlSystemGetDriverVersion(char* version, unsigned size) { return write(version, size, "580.0 (simulated)"); }
Result nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return success;
}
Result nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(settings().num_devices);
  return success;
}
Result nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
  if (index >= static_cast<unsigned>(settings().num_devices)) return invalid_argument;
  *device = handle_of(index);
  return success;
}
Result nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  for (unsigned index = 0; index < static_cast<unsigned>(settings().num_devices); index++) {
    if (uuid_of(index) != uuid) continue;
    *device = handle_of(index);
    return success;
  }
  return not_found;
}
Result nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  unsigned domain, bus;
  if (std::sscanf(id, "%x:%x", &domain, &bus) != 2) return invalid_argument;
  return nvmlDeviceGetHandleByIndex_v2(bus, device);
}
Result nvmlDeviceGetIndex(void* device, unsigned* index) {
  *index = index_of(device);
  return success;
}
Result nvmlDeviceGetName(void*, char* name, unsigned size) { return write(name, size, NAME); }
Result nvmlDeviceGetUUID(void* device, char* uuid, unsigned size) { return write(uuid, size, uuid_of(index_of(device))); }
Result nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
  *major = COMPUTE_CAPABILITY;
  *minor = 0;
  return success;
}
Result nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  memory->total = settings().memory;
  memory->used = bytes_used_of(static_cast<int>(index_of(device)));
  memory->free = memory->total - memory->used;
  return success;
}
Result nvmlDeviceGetMemoryInfo_v2(void* device, Memory_v2* memory) {
  Memory found;
  nvmlDeviceGetMemoryInfo(device, &found);
  memory->total = found.total;
  memory->used = found.used;
  memory->free = found.free;
  memory->reserved = 0;
  return success;
}
Result nvmlDeviceGetP2PStatus(void* device, void* peer, int, int* status) {
  *status = device == peer || settings().has_peers ? 0 : 5;  // not supported
  return success;
}
Result nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) { return not_supported; }
Result nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, Pci*) { return not_supported; }
Result nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;  // it tells of bytes alone
  return success;
}
Result nvmlDeviceGetComputeRunningProcesses_v3(void* device, unsigned* count, void* processes) {
  return nvmlDeviceGetComputeRunningProcesses(device, count, processes);
}
Result nvmlDeviceGetPciInfo_v3(void* device, Pci* pci) {
  *pci = {};
  pci->bus = index_of(device);
  std::snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", pci->bus);
  std::snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
  return success;
}
}
