/* A stand-in for libnvidia-ml with one GPU. What it says stands in the file $NVML_STATE:
   the MiB in use, then for each process its pid and its MiB. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, MOST = 64 };
typedef struct { unsigned pid; unsigned long long used; unsigned gpu, compute; } Process;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;

static unsigned read_state(unsigned long long *used, Process *processes)
{
    unsigned count = 0;
    unsigned long long mebibytes;
    FILE *file = fopen(getenv("NVML_STATE"), "r");
    *used = 0;
    if (!file)
        return 0;
    if (fscanf(file, "%llu", used) != 1)
        *used = 0;
    *used <<= 20;
    while (count < MOST && fscanf(file, "%u %llu", &processes[count].pid, &mebibytes) == 2) {
        processes[count].used = mebibytes << 20;
        processes[count].gpu = processes[count].compute = -1;
        count++;
    }
    fclose(file);
    return count;
}

int nvmlInitWithFlags(unsigned flags) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) { return "an error of the stand-in"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "999.1"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = stdout; return SUCCESS; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) { snprintf(text, size, "Stand-in"); return SUCCESS; }
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) { snprintf(text, size, "GPU-1"); return SUCCESS; }
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *later) { return NOT_SUPPORTED; }

int nvmlDeviceGetMemoryInfo_v2(void *device, Memory *memory)
{
    Process processes[MOST];
    read_state(&memory->used, processes);
    memory->total = 1ULL << 40;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, Process *found)
{
    Process processes[MOST];
    unsigned long long used;
    unsigned room = *count;
    *count = read_state(&used, processes);
    if (*count > room)
        return INSUFFICIENT_SIZE;
    if (*count)
        memcpy(found, processes, *count * sizeof *found);
    return SUCCESS;
}
