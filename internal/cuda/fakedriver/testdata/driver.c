// A CUDA driver without a GPU, for tests: device memory is memory of the host,
// a stream runs its work at once, a kernel writes its arguments into the log.
// It checks what a real driver would crash on: that every handle is alive and
// that a context is current.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int result;
enum { OK, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_IMAGE = 200, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, CAPTURE_WRONG_THREAD = 908 };

// What tests may set.
struct fake {
	int version, init, devices, major, minor;
	int64_t total;
	int64_t fail_at;  // fails the call of this number; 0: none
	int fail_with;
	int64_t calls;    // numbered from 1; inquiries about errors don't count
	int busy;         // queries answer "not ready"
	char fail_in[64]; // fails every call of this function
	char failed[64];  // the call that was made to fail
	int sms, shared;  // multiprocessors, and dynamic shared memory of a block; 0: as any other attribute
	struct { char kernel[32]; int bytes; } argument[12]; // kernels whose names begin so take one, of so many bytes
	// Executes a kernel that takes one argument, or says how many bytes that has if it is
	// null. Where there is none, launches are in the log alone.
	int64_t (*execute)(const char *image, const char *kernel, int64_t grid, int64_t block, int64_t cluster, int64_t shared, int64_t overlap, const void *argument);
};
static struct fake f;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static char text[1 << 20]; // the log
static size_t used;
static int64_t memory;     // bytes of device memory in use
static int retained;
static int defects;        // calls that would have crashed

// Every handle is one of these; freed ones stay, so that their use is seen.
enum kind { BUFFER, HOST, STREAM, EVENT, MODULE, FUNCTION, GRAPH, EXEC, KINDS };
struct object {
	enum kind kind; int alive; int64_t size; void *mem; struct object *next; char name[64]; pthread_t by; int capturing; void *owner;
	char *image;                 // of a module and its functions, where they are executed
	struct queued *first, *last; // of a stream's capture, a graph
};
static struct object *all;
static int context_object;
static __thread int depth;     // of the thread's stack of contexts
static __thread void *current; // the one on top: machine.c has many
#ifndef NO_CONTEXT
#define NO_CONTEXT (depth == 0)
#endif

static void say(const char *format, ...) {
	va_list ap;
	va_start(ap, format);
	if (used < sizeof text - 4096) used += (size_t)vsnprintf(text + used, 4096, format, ap);
	va_end(ap);
}

static struct object *find(enum kind kind, uintptr_t id) {
	for (struct object *o = all; o; o = o->next) {
		uintptr_t at = kind <= HOST ? (uintptr_t)o->mem : (uintptr_t)o;
		if (o->kind == kind && o->alive && at == id) return o;
	}
	defects++;
	say("defect: no live handle of kind %d\n", kind);
	return 0;
}

// within finds the live memory that holds [at, at+n).
static struct object *within(enum kind kind, uintptr_t at, int64_t n) {
	for (struct object *o = all; o; o = o->next)
		if (o->kind == kind && o->alive && at >= (uintptr_t)o->mem && at + n <= (uintptr_t)o->mem + o->size) return o;
	defects++;
	say("defect: %lld bytes outside memory of kind %d\n", (long long)n, kind);
	return 0;
}

// What a stream does, or a graph that it makes: a copy, the setting of memory (from is
// null), or a kernel.
struct queued { struct queued *next; struct object *fn; int64_t grid, block, cluster, shared, overlap; const void *from; void *to; size_t n; int set; };
static int64_t launched; // what was done last was a launch, and nobody has waited for it

// What kernels/copies.cu takes. The kernel is made here, where none are executed: what
// others see of it is that the copies are made.
struct copies {
	uint64_t to[8], from[8];
	int bytes[8];
	int blocks;
};
static result copy_pieces(const struct copies *p, unsigned grid) {
	int n = p->blocks > 0 ? (int)grid / p->blocks : 0;
	if (n < 1 || n > 8 || n * p->blocks != (int)grid) { defects++; say("defect: %u blocks for copies\n", grid); return INVALID_VALUE; }
	for (int i = 0; i < n; i++) {
		if (!p->bytes[i]) continue;
		enum kind from = HOST;
		for (struct object *o = all; o; o = o->next)
			if (o->kind == BUFFER && o->alive && p->from[i] - (uintptr_t)o->mem < (uint64_t)o->size) from = BUFFER;
		if (p->bytes[i] > p->blocks * 4096 || (p->to[i] | p->from[i] | (unsigned)p->bytes[i]) % 4) { defects++; say("defect: a copy of %d bytes\n", p->bytes[i]); return INVALID_VALUE; }
		if (!within(BUFFER, p->to[i], p->bytes[i]) || !within(from, p->from[i], p->bytes[i])) return INVALID_VALUE;
	}
	for (int i = n - 1; i >= 0; i--) memcpy((void *)p->to[i], (void *)p->from[i], p->bytes[i]); // in any order
	return OK;
}

static result perform(const struct queued *w) {
	int64_t overlap = w->overlap && launched;
	launched = w->fn != 0;
	if (w->fn && !f.execute) return copy_pieces(w->from, w->grid);
	if (w->fn) return (result)f.execute(w->fn->image, w->fn->name, w->grid, w->block, w->cluster, w->shared, overlap, w->from);
	if (w->from) memcpy(w->to, w->from, w->n);
	else memset(w->to, w->set, w->n);
	return OK;
}

// queue does it now, or when the graph is launched that the stream makes. What graphs
// hold is given back with the process.
static result queue(struct object *stream, struct queued w) {
	int copies = w.fn && !strcmp(w.fn->name, "copy_pieces");
	if (!f.execute && !copies) return w.fn ? OK : perform(&w);
	if (!stream->capturing) return perform(&w);
	struct queued *kept = malloc(sizeof w);
	if (w.fn) {
		size_t n = copies ? sizeof(struct copies) : (size_t)f.execute(w.fn->image, w.fn->name, 0, 0, 0, 0, 0, 0);
		w.from = memcpy(malloc(n), w.from, n);
	}
	*kept = w;
	if (stream->last) stream->last->next = kept;
	else stream->first = kept;
	stream->last = kept;
	return OK;
}

static struct object *make(enum kind kind) {
	struct object *o = calloc(1, sizeof *o);
	o->kind = kind, o->alive = 1, o->next = all, o->owner = current;
	return all = o;
}

// begin counts a call and says what it is to return; the lock stays held until
// done.
static result begin(const char *name, int needs_context) {
	pthread_mutex_lock(&lock);
	say("%s\n", name);
	f.calls++;
	if (needs_context && NO_CONTEXT) {
		defects++;
		say("defect: %s without a context\n", name);
		return INVALID_CONTEXT;
	}
	if ((f.fail_at && f.calls == f.fail_at) || (f.fail_in[0] && !strcmp(f.fail_in, name))) {
		snprintf(f.failed, sizeof f.failed, "%s", name);
		return f.fail_with;
	}
	return OK;
}
static result done(result r) { pthread_mutex_unlock(&lock); return r; }

#define CALL(needs) result r = begin(__func__, needs); if (r) return done(r)

// Tests' own entry points.
struct fake *fake_state(void) { return &f; }
const char *fake_log(void) { text[used] = 0; return text; }
void fake_forget(void) { used = 0; }
// The live memory that kernels can use: addresses and bytes, at most max pairs; how many there are.
int64_t fake_buffers(uint64_t *pairs, int64_t max) {
	int64_t n = 0;
	for (struct object *o = all; o; o = o->next)
		if (o->kind <= HOST && o->alive && n++ < max) *pairs++ = (uintptr_t)o->mem, *pairs++ = o->size;
	return n;
}
int fake_defects(void) { return defects; }
int fake_live(void) { // objects and retained contexts
	int n = retained;
	for (struct object *o = all; o; o = o->next) n += o->alive && o->kind != FUNCTION;
	return n;
}
void fake_reset(void) {
	while (all) {
		struct object *o = all;
		all = o->next;
		if (o->mem && o->alive) free(o->mem);
		if (o->kind == MODULE) free(o->image);
		free(o);
	}
	memset(&f, 0, sizeof f);
	f.version = 12040, f.devices = 2, f.major = 9, f.total = 1 << 20;
	used = 0, memory = 0, launched = 0, retained = 0, defects = 0;
}

result cuDriverGetVersion(int *v) { CALL(0); *v = f.version; return done(OK); }
result cuInit(unsigned flags) { CALL(0); return done(f.init); }

result cuGetErrorName(result r, const char **s) {
	switch (r) {
	case INVALID_VALUE: *s = "CUDA_ERROR_INVALID_VALUE"; return OK;
	case OUT_OF_MEMORY: *s = "CUDA_ERROR_OUT_OF_MEMORY"; return OK;
	case NO_DEVICE: *s = "CUDA_ERROR_NO_DEVICE"; return OK;
	case NOT_FOUND: *s = "CUDA_ERROR_NOT_FOUND"; return OK;
	}
	*s = 0;
	return INVALID_VALUE;
}
result cuGetErrorString(result r, const char **s) {
	switch (r) {
	case INVALID_VALUE: *s = "invalid argument"; return OK;
	case OUT_OF_MEMORY: *s = "out of memory"; return OK;
	case NO_DEVICE: *s = "no CUDA-capable device is detected"; return OK;
	case NOT_FOUND: *s = "named symbol not found"; return OK;
	}
	*s = 0;
	return INVALID_VALUE;
}

result cuDeviceGetCount(int *n) { CALL(0); *n = f.devices; return done(OK); }
result cuDeviceGet(int *dev, int ordinal) { CALL(0); *dev = ordinal + 40; return done(OK); }
result cuDeviceGetName(char *name, int n, int dev) { CALL(0); snprintf(name, n, "Fake %d", dev - 40); return done(OK); }
result cuDeviceTotalMem_v2(size_t *n, int dev) { CALL(0); *n = f.total; return done(OK); }
result cuDeviceGetAttribute(int *v, int id, int dev) { CALL(0); *v = id == 75 ? f.major : id == 76 ? f.minor : id == 16 && f.sms ? f.sms : id == 97 && f.shared ? f.shared : 1000 + id; return done(OK); }
result cuDevicePrimaryCtxRetain(void **ctx, int dev) { CALL(0); retained++; *ctx = &context_object; return done(OK); }
// Giving something back works even when it reports the failure of something
// earlier; so do calls that fail here on demand.
result cuDevicePrimaryCtxRelease_v2(int dev) { result r = begin(__func__, 0); retained--; return done(r); }
result cuCtxPushCurrent_v2(void *ctx) {
	CALL(0);
	if (ctx != &context_object || !retained) { defects++; say("defect: no such context\n"); return done(INVALID_CONTEXT); }
	depth++;
	return done(OK);
}
result cuCtxPopCurrent_v2(void **ctx) { result r = begin(__func__, 1); if (depth > 0) depth--; return done(r); }
result cuCtxSynchronize(void) { CALL(1); return done(OK); }

result cuMemGetInfo_v2(size_t *free, size_t *total) { CALL(1); *free = f.total - memory, *total = f.total; return done(OK); }
result cuMemAlloc_v2(uint64_t *p, size_t n) {
	CALL(1);
	if ((int64_t)n > f.total - memory) return done(OUT_OF_MEMORY);
	struct object *o = make(BUFFER);
	o->mem = aligned_alloc(256, (n + 255) / 256 * 256), o->size = n, memory += n; // as a real one does
	memset(o->mem, 0xa5, n);
	*p = (uint64_t)(uintptr_t)o->mem;
	return done(OK);
}
static result give_back(const char *name, enum kind kind, uintptr_t id) {
	result r = begin(name, 1);
	struct object *o = find(kind, id);
	if (!o) return done(INVALID_HANDLE);
	o->alive = 0;
	if (o->mem) free(o->mem);
	if (kind == BUFFER) memory -= o->size;
	return done(r);
}
result cuMemFree_v2(uint64_t p) { return give_back(__func__, BUFFER, p); }
result cuMemHostAlloc(void **p, size_t n, unsigned flags) {
	CALL(1);
	struct object *o = make(HOST);
	*p = o->mem = calloc(n, 1), o->size = n;
	return done(OK);
}
result cuMemFreeHost(void *p) { return give_back(__func__, HOST, (uintptr_t)p); }

result cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, struct object *s) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s) || !within(BUFFER, to, n)) return done(INVALID_VALUE);
	return done(queue(s, (struct queued){ .to = (void *)to, .from = from, .n = n }));
}
result cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, struct object *s) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s) || !within(BUFFER, from, n)) return done(INVALID_VALUE);
	return done(queue(s, (struct queued){ .to = to, .from = (void *)from, .n = n }));
}
result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, struct object *s) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s) || !within(BUFFER, from, n) || !within(BUFFER, to, n)) return done(INVALID_VALUE);
	return done(queue(s, (struct queued){ .to = (void *)to, .from = (void *)from, .n = n }));
}
result cuMemsetD8Async(uint64_t to, unsigned char v, size_t n, struct object *s) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s) || !within(BUFFER, to, n)) return done(INVALID_VALUE);
	return done(queue(s, (struct queued){ .to = (void *)to, .n = n, .set = v }));
}

static result simple(const char *name, enum kind kind, void **id) {
	result r = begin(name, 1);
	if (!r) *id = make(kind);
	return done(r);
}
static result on(const char *name, enum kind k1, void *a, enum kind k2, void *b) {
	result r = begin(name, 1);
	if (!find(k1, (uintptr_t)a) || !find(k2, (uintptr_t)b)) return done(INVALID_HANDLE);
	return done(r);
}
result cuStreamCreate(void **s, unsigned flags) {
	if (flags > 1) return INVALID_VALUE;
	result r = simple(__func__, STREAM, s);
	if (!flags) say("blocking\n");
	return r;
}
result cuStreamDestroy_v2(void *s) { return give_back(__func__, STREAM, (uintptr_t)s); }
result cuStreamSynchronize(void *s) { launched = 0; return on(__func__, STREAM, s, STREAM, s); }
result cuStreamQuery(void *s) { result r = on(__func__, STREAM, s, STREAM, s); return r ? r : f.busy ? NOT_READY : OK; }
result cuStreamWaitEvent(void *s, void *e, unsigned flags) { return on(__func__, STREAM, s, EVENT, e); }
result cuEventCreate(void **e, unsigned flags) { return simple(__func__, EVENT, e); }
result cuEventDestroy_v2(void *e) { return give_back(__func__, EVENT, (uintptr_t)e); }
result cuEventRecord(void *e, void *s) { return on(__func__, EVENT, e, STREAM, s); }
result cuEventSynchronize(void *e) { return on(__func__, EVENT, e, EVENT, e); }
result cuEventQuery(void *e) { result r = on(__func__, EVENT, e, EVENT, e); return r ? r : f.busy ? NOT_READY : OK; }
result cuEventElapsedTime(float *ms, void *start, void *end) { *ms = 1.5f; return on(__func__, EVENT, start, EVENT, end); }

// An image is the word "image" and names of kernels. A kernel's name says the
// sizes of its arguments: add_8_8_4.
result cuModuleLoadData(void **m, const char *image) {
	CALL(1);
	if (!f.execute && strncmp(image, "image", 5) && strncmp(image, "\x7f" "ELF", 4)) return done(INVALID_IMAGE);
	struct object *o = make(MODULE);
	if (f.execute) o->image = strdup(image); // PTX
	*m = o;
	return done(OK);
}
result cuModuleUnload(void *m) { return give_back(__func__, MODULE, (uintptr_t)m); }
result cuModuleGetFunction(void **fn, void *m, const char *name) {
	CALL(1);
	if (!find(MODULE, (uintptr_t)m)) return done(INVALID_HANDLE);
	if (!strchr(name, '_')) return done(NOT_FOUND);
	struct object *o = make(FUNCTION);
	snprintf(o->name, sizeof o->name, "%s", name);
	o->mem = 0, o->image = ((struct object *)m)->image, *fn = o;
	if (o->image && f.execute(o->image, o->name, 0, 0, 0, 0, 0, 0) < 0) {
		o->alive = 0;
		return done(NOT_FOUND);
	}
	return done(OK);
}
result cuFuncGetAttribute(int *v, int id, void *fn) { CALL(1); *v = 2000 + id; return done(find(FUNCTION, (uintptr_t)fn) ? OK : INVALID_HANDLE); }
result cuFuncSetAttribute(void *fn, int id, int v) {
	CALL(1);
	say("attribute %d = %d\n", id, v);
	return done(find(FUNCTION, (uintptr_t)fn) ? OK : INVALID_HANDLE);
}
result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *fn, int threads, size_t shared) {
	CALL(1);
	*n = 2048 / threads;
	return done(find(FUNCTION, (uintptr_t)fn) ? OK : INVALID_HANDLE);
}

static void say_args(struct object *fn, void **params) {
	int i = 0;
	if (f.execute) return;
	say("args");
	for (int j = 0; j < 12 && f.argument[j].bytes; j++) {
		if (strncmp(fn->name, f.argument[j].kernel, strlen(f.argument[j].kernel))) continue;
		say(" ");
		for (int k = 0; k < f.argument[j].bytes; k++) say("%02x", ((unsigned char *)params[0])[k]);
		say("\n");
		return;
	}
	for (char *at = strchr(fn->name, '_'); at; at = strchr(at + 1, '_'), i++) {
		say(" ");
		for (int n = atoi(at + 1), k = 0; k < n; k++) say("%02x", ((unsigned char *)params[i])[k]);
	}
	say("\n");
}
result cuLaunchKernel(struct object *fn, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                      unsigned shared, void *s, void **params, void **extra) {
	CALL(1);
	if (!find(FUNCTION, (uintptr_t)fn) || !find(STREAM, (uintptr_t)s) || extra) return done(INVALID_HANDLE);
	say("kernel %s\n", fn->name);
	say("grid %u %u %u block %u %u %u shared %u\n", x, y, z, tx, ty, tz, shared);
	say_args(fn, params);
	return done(queue(s, (struct queued){ .fn = fn, .grid = x, .block = tx, .cluster = 1, .shared = shared, .from = params[0] }));
}
struct attribute { unsigned id; char pad[4]; union { char pad[64]; int cooperative; struct { unsigned x, y, z; } cluster; } v; };
struct config { unsigned x, y, z, tx, ty, tz, shared; void *stream; struct attribute *attrs; unsigned n; };
result cuOccupancyMaxActiveClusters(int *n, void *fn, const struct config *c) {
	CALL(1);
	unsigned size = 1;
	for (unsigned i = 0; i < c->n; i++)
		if (c->attrs[i].id == 4) size = c->attrs[i].v.cluster.x * c->attrs[i].v.cluster.y * c->attrs[i].v.cluster.z;
	*n = (f.sms ? f.sms : 1) / size;
	return done(find(FUNCTION, (uintptr_t)fn) ? OK : INVALID_HANDLE);
}

result cuLaunchKernelEx(const struct config *c, struct object *fn, void **params, void **extra) {
	CALL(1);
	if (!find(FUNCTION, (uintptr_t)fn) || !find(STREAM, (uintptr_t)c->stream) || extra) return done(INVALID_HANDLE);
	say("kernel %s\n", fn->name);
	say("grid %u %u %u block %u %u %u shared %u\n", c->x, c->y, c->z, c->tx, c->ty, c->tz, c->shared);
	unsigned cluster = 1, overlap = 0;
	for (unsigned i = 0; i < c->n; i++) {
		if (c->attrs[i].id == 4) cluster = c->attrs[i].v.cluster.x;
		if (c->attrs[i].id == 6) overlap = (unsigned)c->attrs[i].v.cooperative;
		if (c->attrs[i].id == 2) say("cooperative %d\n", c->attrs[i].v.cooperative);
		if (c->attrs[i].id == 6) say("overlap %d\n", c->attrs[i].v.cooperative);
		if (c->attrs[i].id == 4) say("cluster %u %u %u\n", c->attrs[i].v.cluster.x, c->attrs[i].v.cluster.y, c->attrs[i].v.cluster.z);
	}
	say_args(fn, params);
	return done(queue(c->stream, (struct queued){ .fn = fn, .grid = c->x, .block = c->tx, .cluster = cluster, .shared = c->shared, .overlap = overlap, .from = params[0] }));
}

// A map is its arguments, 64 bits each.
result cuTensorMapEncodeTiled(uint64_t *map, int type, unsigned rank, uint64_t at, const uint64_t *dims, const uint64_t *strides,
                              const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
	CALL(1);
	if ((uintptr_t)map % 64 || at % 16 || rank != 3 || strides[0] % 16 || strides[1] % 16) return done(INVALID_VALUE);
	for (unsigned i = 0; i < rank; i++) if (!dims[i] || !box[i] || box[i] > 256 || steps[i] != 1) return done(INVALID_VALUE);
	uint64_t all[16] = { at, type, dims[0], dims[1], dims[2], strides[0], strides[1], box[0], box[1], box[2], interleave, swizzle, promotion, fill };
	memcpy(map, all, sizeof all);
	return done(OK);
}

result cuStreamBeginCapture_v2(struct object *s, int mode) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s)) return done(INVALID_HANDLE);
	s->capturing = 1, s->by = pthread_self(), s->first = s->last = 0;
	return done(OK);
}
// Nothing that this driver has is refused while a thread captures.
result cuThreadExchangeStreamCaptureMode(int *mode) {
	CALL(0);
	static __thread int now;
	int before = now;
	if (*mode < 0 || *mode > 2) return done(INVALID_VALUE);
	now = *mode, *mode = before;
	return done(OK);
}
result cuStreamEndCapture(struct object *s, void **graph) {
	result r = begin(__func__, 1);
	*graph = 0;
	if (!find(STREAM, (uintptr_t)s)) return done(INVALID_HANDLE);
	if (!s->capturing || !pthread_equal(s->by, pthread_self())) { defects++; return done(CAPTURE_WRONG_THREAD); }
	s->capturing = 0;
	if (r) return done(r);
	struct object *o = make(GRAPH);
	o->first = s->first, *graph = o;
	return done(r);
}
result cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
	CALL(1);
	if (!find(GRAPH, (uintptr_t)graph)) return done(INVALID_HANDLE);
	struct object *o = make(EXEC);
	o->first = ((struct object *)graph)->first, *exec = o;
	return done(OK);
}
result cuGraphGetRootNodes(struct object *graph, void **nodes, size_t *n) {
	CALL(1);
	if (!find(GRAPH, (uintptr_t)graph)) return done(INVALID_HANDLE);
	if (*n && graph->first) nodes[0] = graph->first; // what streams do is one behind the other
	*n = graph->first != 0;
	return done(OK);
}
// The other texts of a node that can be had here are other copies.
struct node_params { struct object *fn; unsigned x, y, z, tx, ty, tz, shared; void **params, **extra; };
result cuGraphExecKernelNodeSetParams(struct object *exec, struct queued *node, const struct node_params *p) {
	CALL(1);
	if (!find(EXEC, (uintptr_t)exec) || !find(FUNCTION, (uintptr_t)p->fn) || p->extra) return done(INVALID_HANDLE);
	struct queued *w = exec->first;
	while (w && w != node) w = w->next;
	if (!w || w->fn != p->fn || strcmp(p->fn->name, "copy_pieces")) { defects++; say("defect: no such node\n"); return done(INVALID_VALUE); }
	say("grid %u %u %u block %u %u %u shared %u\n", p->x, p->y, p->z, p->tx, p->ty, p->tz, p->shared);
	w->from = memcpy(malloc(sizeof(struct copies)), p->params[0], sizeof(struct copies));
	w->grid = p->x, w->block = p->tx, w->shared = p->shared;
	return done(OK);
}
result cuGraphDestroy(void *g) { return give_back(__func__, GRAPH, (uintptr_t)g); }
result cuGraphExecDestroy(void *g) { return give_back(__func__, EXEC, (uintptr_t)g); }
result cuGraphLaunch(struct object *g, void *s) {
	CALL(1);
	if (!find(EXEC, (uintptr_t)g) || !find(STREAM, (uintptr_t)s)) return done(INVALID_HANDLE);
	launched = 0; // graphs do not overlap
	for (struct queued *w = g->first; w && !r; w = w->next) r = perform(w);
	launched = 0;
	return done(r);
}
