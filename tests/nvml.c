/* A libnvidia-ml.so.1 that answers from a text file ($NVML_ANSWERS), for machines without a GPU. Lines:

   gpu USED MIG              one GPU: bytes in use; 1 when it is divided (MIG)
   instance GPU USED         one MIG instance of it
   process GPU INSTANCE KIND PID BYTES    INSTANCE -1: of the GPU itself; KIND c, g or m; BYTES -1: not known
   fail NAME CODE            the call NAME (init, mps, memory, uuid) returns CODE
   hang NAME                 the call NAME never returns
*/
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, NOT_FOUND = 6, TOO_SMALL = 7, MOST = 64 };
typedef unsigned long long u64;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } Process;
typedef struct { unsigned version; u64 total, reserved, free, used; } Memory;
typedef struct { int gpu, instance; u64 used; int mig; } Device; /* instance -1: the GPU itself */
typedef struct { int gpu, instance; char kind; unsigned pid; long long used; } Entry;
typedef struct { char name[16]; int code; } Fault;

static Device devices[MOST];
static Entry entries[MOST];
static Fault faults[MOST];
static int device_count, entry_count, fault_count, gpu_count;

static int fault(const char *name) {
    for (int i = 0; i < fault_count; i++)
        if (!strcmp(faults[i].name, name)) {
            while (faults[i].code < 0) pause();
            return faults[i].code;
        }
    return SUCCESS;
}

static Device *find(int gpu, int instance) {
    for (int i = 0; i < device_count; i++)
        if (devices[i].gpu == gpu && devices[i].instance == instance) return &devices[i];
    return NULL;
}

int nvmlInitWithFlags(unsigned flags) {
    char line[128];
    FILE *file = fopen(getenv("NVML_ANSWERS"), "r");
    (void)flags;
    if (!file) return 9;
    device_count = entry_count = fault_count = gpu_count = 0;
    while (fgets(line, sizeof line, file)) {
        Device device = {0}; Entry entry; Fault failing;
        if (sscanf(line, "gpu %llu %d", &device.used, &device.mig) == 2) {
            device.gpu = gpu_count++; device.instance = -1; devices[device_count++] = device;
        } else if (sscanf(line, "instance %d %llu", &device.gpu, &device.used) == 2) {
            while (find(device.gpu, device.instance)) device.instance++;
            devices[device_count++] = device;
        } else if (sscanf(line, "process %d %d %c %u %lld", &entry.gpu, &entry.instance, &entry.kind, &entry.pid, &entry.used) == 5)
            entries[entry_count++] = entry;
        else if (sscanf(line, "fail %15s %d", failing.name, &failing.code) == 2) faults[fault_count++] = failing;
        else if (sscanf(line, "hang %15s", failing.name) == 1) { failing.code = -1; faults[fault_count++] = failing; }
    }
    fclose(file);
    return fault("init");
}

int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "An error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "999.1"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = gpu_count; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **handle) {
    *handle = find(index, -1);
    return *handle ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetName(Device *device, char *text, unsigned size) {
    (void)device;
    snprintf(text, size, "Stand-in");
    return SUCCESS;
}

int nvmlDeviceGetUUID(Device *device, char *text, unsigned size) {
    snprintf(text, size, device->instance < 0 ? "GPU-%d" : "MIG-%d-%d", device->gpu, device->instance);
    return fault("uuid");
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    *current = *pending = device->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) { (void)device; *count = 7; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **handle) {
    *handle = find(device->gpu, index);
    return *handle ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetMemoryInfo_v2(Device *device, Memory *memory) {
    memory->total = 80ull << 30; memory->reserved = 500ull << 20; memory->used = device->used;
    return fault("memory");
}

static int list(Device *device, char kind, unsigned *count, Process *out) {
    unsigned room = *count, found = 0;
    for (int i = 0; i < entry_count; i++) {
        Entry *entry = &entries[i];
        if (entry->gpu != device->gpu || entry->instance != device->instance || entry->kind != kind) continue;
        if (found < room && out)
            out[found] = (Process){entry->pid, entry->used < 0 ? ~0ull : (u64)entry->used, ~0u, ~0u};
        found++;
    }
    *count = found;
    return found > room ? TOO_SMALL : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, Process *out) {
    return list(device, 'c', count, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(Device *device, unsigned *count, Process *out) {
    return list(device, 'g', count, out);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(Device *device, unsigned *count, Process *out) {
    int code = fault("mps");
    return code ? code : list(device, 'm', count, out);
}
