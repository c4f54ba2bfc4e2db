/* An NVML that needs no GPU, for tests: its counter moves at every third look, by 2.5 J. */
#include <string.h>

static int opened, looks, fail;

int fake_opened(void) { return opened; }
void fake_fail(int code) { fail = code; }

int nvmlInit_v2(void) {
	opened++;
	return 0;
}

int nvmlShutdown(void) {
	opened--;
	return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
	if (index > 1) return 2;
	*device = (void *)(long)(index + 1);
	return 0;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
	if (length < 96) return 7;
	strcpy(name, NAME);
	return device ? 0 : 2;
}

int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *energy) {
	if (fail) return fail;
	*energy = (unsigned long long)(looks++ / 3) * 2500;
	return device ? 0 : 2;
}

const char *nvmlErrorString(int result) { return result == 3 ? "Not Supported" : "Invalid Argument"; }
