// An NCCL without a GPU, for tests: the ranks are processes of one host, which meet in
// shared memory, and what a collective does is queued on a stream of the driver that needs
// no GPU either. A collective waits for the others as NCCL's kernels do: for ever, until
// its communicator is aborted; other streams go on meanwhile. It checks what NCCL leaves to its users: that all ranks ask
// for the same. The environment sets FAKE_NCCL_VERSION, its version; FAKE_NCCL_FAIL, the
// name of a function that fails; FAKE_NCCL_ASYNC, the collective after which there is an
// asynchronous error.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int result;
enum { OK, UNHANDLED_CUDA = 1, SYSTEM = 2, INTERNAL = 3, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE = 6 };
enum { INT8 = 0, INT32 = 2, F16 = 6, F32 = 7, BF16 = 9 };
enum { RANKS = 8, SLOT = 1 << 16 };

static _Thread_local char last[256];
static atomic_int live;

static result fails(const char *name) {
	const char *f = getenv("FAKE_NCCL_FAIL");
	if (!f || strcmp(f, name)) return OK;
	snprintf(last, sizeof last, "%s was told to fail", name);
	return SYSTEM;
}

// What the ranks share.
struct shared {
	atomic_int arrived;
	atomic_int taken[RANKS];
	atomic_long phase[RANKS]; // of each rank: how many meetings it has come to
	struct call { int kind, type, root; int64_t count; } call[RANKS];
	char slot[RANKS][SLOT];
};

struct comm {
	struct shared *s;
	int size, rank;
	long phase;
	atomic_int aborted, error;
	long collectives;
};

struct id { char name[64]; char zero[64]; };

result ncclGetVersion(int *v) {
	const char *s = getenv("FAKE_NCCL_VERSION");
	*v = s ? atoi(s) : 22809;
	return fails(__func__);
}
const char *ncclGetErrorString(result r) {
	switch (r) {
	case OK: return "no error";
	case SYSTEM: return "unhandled system error";
	case INVALID_ARGUMENT: return "invalid argument";
	case INVALID_USAGE: return "invalid usage";
	case REMOTE: return "remote process exited or there was a network error";
	}
	return "unknown result code";
}
const char *ncclGetLastError(void *comm) { return last; }

result ncclGetUniqueId(struct id *id) {
	static atomic_int made;
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	memset(id, 0, sizeof *id);
	snprintf(id->name, sizeof id->name, "/fakenccl.%d.%d.%ld", (int)getpid(), made++, now.tv_nsec);
	return fails(__func__);
}

static void nap(void) { usleep(50); }

result ncclCommInitRankScalable(struct comm **out, int size, int rank, int ids, struct id *id, void *config) {
	if (fails(__func__)) return SYSTEM;
	const char *nvls = getenv("NCCL_NVLS_ENABLE");
	if (!nvls) {
		snprintf(last, sizeof last, "NCCL_NVLS_ENABLE is not set");
		return INVALID_USAGE;
	}
	if (ids != 1 || size < 1 || size > RANKS || rank < 0 || rank >= size) return INVALID_ARGUMENT;
	int fd = shm_open(id->name, O_RDWR | O_CREAT, 0600);
	if (fd < 0 || ftruncate(fd, sizeof(struct shared))) return SYSTEM;
	struct shared *s = mmap(0, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (s == MAP_FAILED) return SYSTEM;
	if (atomic_fetch_add(&s->taken[rank], 1)) {
		snprintf(last, sizeof last, "two of rank %d", rank);
		return INVALID_USAGE;
	}
	atomic_fetch_add(&s->arrived, 1);
	for (int i = 0; s->arrived < size; i++) {
		if (i > 200000) { // 10 s and more
			shm_unlink(id->name);
			return SYSTEM;
		}
		nap();
	}
	shm_unlink(id->name);
	struct comm *c = calloc(1, sizeof *c);
	c->s = s, c->size = size, c->rank = rank;
	*out = c, live++;
	return OK;
}

static result release(struct comm *c) {
	munmap(c->s, sizeof *c->s);
	live--;
	return OK; // c stays: graphs may name it
}
// Both wait for the others, or for nobody. A collective that waits sees the abort first.
result ncclCommDestroy(struct comm *c) { return release(c); }
static atomic_int inside;
result ncclCommAbort(struct comm *c) {
	c->aborted = 1;
	while (inside) nap();
	return release(c);
}
result ncclCommGetAsyncError(struct comm *c, result *r) { *r = c->error; return OK; }
int fake_nccl_live(void) { return live; }

// come says that this rank has come to the next meeting, and all whether all have.
static void come(struct comm *c) { c->s->phase[c->rank] = ++c->phase; }
static int all(struct comm *c) {
	for (int i = 0; i < c->size; i++)
		if (c->s->phase[i] < c->phase) return 0;
	return 1;
}

static float get(const char *p, int64_t i, int type) {
	if (type == F32) return ((const float *)p)[i];
	if (type == F16) return (float)((const _Float16 *)p)[i];
	uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
	float x;
	memcpy(&x, &bits, 4);
	return x;
}
static void put(char *p, int64_t i, int type, float x) {
	uint32_t bits;
	memcpy(&bits, &x, 4);
	if (type == F32) ((float *)p)[i] = x;
	else if (type == F16) ((_Float16 *)p)[i] = (_Float16)x;
	else ((uint16_t *)p)[i] = (bits + (x == x ? 0x7fff + ((bits >> 16) & 1) : 0)) >> 16;
}
static int size_of(int type) { return type == F32 || type == INT32 ? 4 : type == INT8 ? 1 : 2; }

enum kind { REDUCE = 1, GATHER, BROADCAST };
struct work { struct comm *c; struct call call; const char *send; char *recv; int line; int64_t at; };

// The driver's: it is called again, and others have their turn meanwhile.
enum { WAITS = 601 };
// UNTIL goes on here when it is called again.
#define UNTIL(x) do { w->line = __LINE__; case __LINE__: if (c->aborted) goto end; if (!(x)) return WAITS; } while (0)

// go does what it can of a collective, whose turn has come in the stream.
static result go(struct work *w) {
	struct comm *c = w->c;
	struct shared *s = c->s;
	int size = size_of(w->call.type);
	int64_t step = SLOT / size, n = w->call.count - w->at < step ? w->call.count - w->at : step;
	const char *bad;
	switch (w->line) {
	case 0:
	bad = getenv("FAKE_NCCL_ASYNC");
	if (bad && ++c->collectives > atol(bad)) c->error = REMOTE;
	if (c->aborted) goto end;
	s->call[c->rank] = w->call;
	come(c);
	UNTIL(all(c));
	for (int i = 0; i < c->size; i++)
		if (memcmp(&s->call[i], &w->call, sizeof w->call)) {
			fprintf(stderr, "fake NCCL: rank %d asks for %d of %ld, rank %d for %d of %ld\n", c->rank, w->call.kind, (long)w->call.count, i, s->call[i].kind, (long)s->call[i].count);
			c->error = INVALID_USAGE;
		}
	// Nobody goes on to the next one's call before all have looked at this one's.
	come(c);
	UNTIL(all(c));
	UNTIL(!c->error); // as NCCL's kernels: what goes wrong is waited for until the abort
	for (; w->at < w->call.count; w->at += n) {
		n = w->call.count - w->at < step ? w->call.count - w->at : step;
		memcpy(s->slot[c->rank], w->send + w->at * size, n * size);
		come(c);
		UNTIL(all(c));
		switch (w->call.kind) {
		case REDUCE:
			for (int64_t i = 0; i < n; i++) {
				float sum = 0;
				for (int r = 0; r < c->size; r++) sum += get(s->slot[r], i, w->call.type);
				put(w->recv, w->at + i, w->call.type, sum);
			}
			break;
		case GATHER:
			for (int r = 0; r < c->size; r++) memcpy(w->recv + (r * w->call.count + w->at) * size, s->slot[r], n * size);
			break;
		default:
			memcpy(w->recv + w->at * size, s->slot[w->call.root], n * size);
		}
		come(c);
		UNTIL(all(c));
	}
	}
end:
	w->line = 0, w->at = 0; // graphs may do it again
	return OK;
}
static result collective(const void *with) {
	inside++;
	result r = go((struct work *)with);
	inside--;
	return r;
}

typedef int (*queue_func)(void *stream, result (*)(const void *), const void *, uint64_t, int64_t, uint64_t, int64_t);
static queue_func driver(void) {
	static queue_func f;
	const char *names[] = { "libcuda.so.1", "libfakecuda.so" };
	for (int i = 0; !f && i < 2; i++) {
		void *lib = dlopen(names[i], RTLD_NOW | RTLD_NOLOAD);
		if (lib) f = (queue_func)dlsym(lib, "fake_queue");
	}
	return f;
}

static result queue(const char *name, struct comm *c, int kind, const void *send, void *recv, int64_t count, int type, int root, void *stream) {
	if (fails(name)) return SYSTEM;
	if (type != INT8 && type != INT32 && type != F16 && type != F32 && type != BF16) return INVALID_ARGUMENT;
	if (kind == REDUCE && (type == INT8 || type == INT32)) return INVALID_ARGUMENT;
	queue_func f = driver();
	if (!f) return INTERNAL;
	struct work *w = calloc(1, sizeof *w);
	w->c = c, w->send = send, w->recv = recv;
	w->call.kind = kind, w->call.type = type, w->call.root = root, w->call.count = count;
	int64_t n = count * size_of(type);
	return f(stream, collective, w, (uintptr_t)send, n, (uintptr_t)recv, kind == GATHER ? n * c->size : n) ? UNHANDLED_CUDA : OK;
}
result ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, struct comm *c, void *stream) {
	return op ? INVALID_ARGUMENT : queue(__func__, c, REDUCE, send, recv, count, type, 0, stream);
}
result ncclAllGather(const void *send, void *recv, size_t count, int type, struct comm *c, void *stream) {
	return queue(__func__, c, GATHER, send, recv, count, type, 0, stream);
}
result ncclBroadcast(const void *send, void *recv, size_t count, int type, int root, struct comm *c, void *stream) {
	return queue(__func__, c, BROADCAST, send, recv, count, type, root, stream);
}
