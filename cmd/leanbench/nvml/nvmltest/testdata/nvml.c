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

/* Between two samples multiprocessors are busy for 75%, and the memory for 50%. A GPU whose counter of energy fails has none. */
struct sample { int taken; };
static struct sample samples[8];
static int allocated;

int fake_samples(void) { return allocated; }

int nvmlGpmQueryDeviceSupport(void *device, unsigned *support) {
	if (support[0] != 1) return 25;
	support[1] = !fail;
	return 0;
}

int nvmlGpmSampleAlloc(struct sample **s) {
	*s = &samples[allocated++];
	(*s)->taken = 0;
	return 0;
}

int nvmlGpmSampleFree(struct sample *s) {
	allocated--;
	return 0;
}

int nvmlGpmSampleGet(void *device, struct sample *s) {
	s->taken = ++looks;
	return device ? 0 : 2;
}

struct metrics {
	unsigned version, n;
	struct sample *from, *to;
	struct { unsigned id; int result; double value; char *info[3]; } of[333];
};

int nvmlGpmMetricsGet(struct metrics *m) {
	unsigned i;
	if (m->version != 1 || m->from->taken == 0 || m->to->taken <= m->from->taken) return 2;
	for (i = 0; i < m->n; i++) {
		m->of[i].result = m->of[i].id == 2 || m->of[i].id == 10 ? 0 : 3;
		m->of[i].value = m->of[i].id == 2 ? 75 : 50;
	}
	memset(m->of + i, 0, (333 - i) * sizeof *m->of); /* there is room for as many */
	return 0;
}

const char *nvmlErrorString(int result) { return result == 3 ? "Not Supported" : "Invalid Argument"; }
