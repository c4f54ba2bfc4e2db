// A CUDA driver without a GPU, for tests: device memory is memory of the host,
// a stream runs its work at once, or as late as it may, and a kernel writes its arguments
// into the log. It checks what a real driver would crash on: that every handle is alive,
// that a context is current, and that the work of a GPU uses memory of others only where
// it has access.
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int result;
enum { OK, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_IMAGE = 200, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, WAITS = 601, LAUNCH_FAILED = 719, PEER_ACCESS_ALREADY_ENABLED = 704, CAPTURE_UNJOINED = 904,
       CAPTURE_ISOLATION = 905, CAPTURE_WRONG_THREAD = 908 };

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
	struct { char kernel[32]; int bytes; } argument[14]; // kernels whose names begin so take one, of so many bytes
	// Executes a kernel that takes one argument, or says how many bytes that has if it is
	// null. Where there is none, launches are in the log alone. If turn is null it executes all of
	// it; else this is the launch's name, which has a turn: the answer is NOT_READY if it has not
	// ended, and WAITS if it also did nothing but wait. One whose turn is over ends with an error.
	int64_t (*execute)(const char *image, const char *kernel, int64_t grid, int64_t block, int64_t cluster, int64_t shared, int64_t overlap, const void *argument, int64_t device, const void *queue, const void *turn, int64_t over);
	int fail_on;          // the failing calls are those with GPU fail_on-1 current; 0: any
	int apart;            // no GPU has access to the memory of another
	int64_t totals[8];    // bytes of each GPU; 0: total
	uint64_t late;        // not 0: work is done at any time that its order allows, by numbers drawn from this
	uint64_t turns;       // not 0: kernels of GPUs that reach each other run at once, in turns, by numbers drawn from this
	int64_t clock;        // what those kernels take for the time, in nanoseconds
	int64_t buffers;      // how often memory was taken and given back
};
static struct fake f;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static char text[1 << 20]; // the log
static size_t used;
static int defects;        // calls that would have crashed

// The primary contexts.
enum { GPUS = 8 };
static struct primary {
	int retained;
	int64_t memory; // bytes in use
	unsigned reach; // bits of the GPUs whose memory it has access to
} primaries[GPUS];
static int is_primary(const void *c) { return c >= (const void *)primaries && c < (const void *)(primaries + GPUS); }
static int gpu_of(const void *c) { return is_primary(c) ? (int)((const struct primary *)c - primaries) : 0; }
static int64_t total_of(int gpu) { return f.totals[gpu] ? f.totals[gpu] : f.total; }

// Every handle is one of these; freed ones stay, so that their use is seen, in a list that no call goes through.
enum kind { BUFFER, HOST, STREAM, EVENT, MODULE, FUNCTION, GRAPH, EXEC, KINDS };
struct object {
	enum kind kind; int alive; int64_t size; void *mem; struct object *next; char name[64]; pthread_t by; int capturing; void *owner;
	char *image;                 // of a module and its functions, where they are executed
	// A lane is what is to be done in order; launched: what was done last was a launch, and nobody has waited for it.
	struct lane { struct object *stream; struct queued *first, *last; int launched; } lanes[GPUS]; // of a capture and a graph: its streams, the one that began first
	int count;                   // of lanes
	int64_t capture;             // of a stream: its number
	struct object *origin;       // of a stream that has come to the capture of another
	struct lane todo;            // of a stream: what is not done yet
	result failed;               // of a stream: what went wrong since somebody has waited for it
	struct object *other;        // of a stream: the next one that there is
	struct queued *mark;         // of an event: where it was recorded last
};
static struct object *all[KINDS], *dead, *streams; // all: what is alive, by kind
static __thread int depth;     // of the thread's stack of contexts
static __thread void *current; // the one on top: machine.c has others
static __thread void *pushed[64];
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
	for (struct object *o = all[kind]; o; o = o->next) {
		uintptr_t at = kind <= HOST ? (uintptr_t)o->mem : (uintptr_t)o;
		if (o->alive && at == id) return o;
	}
	defects++;
	say("defect: no live handle of kind %d\n", kind);
	return 0;
}

// reaches says whether what runs in a context has access to memory of another.
static int reaches(const void *from, const void *to) {
	if (from == to || !is_primary(from) || !is_primary(to)) return 1;
	return ((const struct primary *)from)->reach >> gpu_of(to) & 1;
}

// within finds the live memory that holds [at, at+n), for work of a context.
static struct object *within(enum kind kind, uintptr_t at, int64_t n, const void *by) {
	for (struct object *o = all[kind]; o; o = o->next) {
		if (!o->alive || at < (uintptr_t)o->mem || at + n > (uintptr_t)o->mem + o->size) continue;
		if (kind == HOST || reaches(by, o->owner)) return o;
		defects++;
		say("defect: GPU %d has no access to memory of GPU %d\n", gpu_of(by), gpu_of(o->owner));
		return 0;
	}
	defects++;
	say("defect: %lld bytes outside memory of kind %d\n", (long long)n, kind);
	return 0;
}

// What a stream does, or a graph that it makes: a copy, the setting of memory (from is
// null), a kernel, a graph, the recording of an event, the waiting for one, or what another
// library has queued: a function (to) and what it takes (from).
enum doing { COPY, SET, KERNEL, LAUNCH, MARK, WAIT, FOREIGN };
struct queued {
	enum doing work;
	struct queued *next; struct object *fn; int64_t grid, block, cluster, shared, overlap; const void *from; void *to; size_t n; int set;
	void *argument;            // of a kernel, its own
	struct queued *after;      // what a WAIT waits for
	struct object *by;         // the stream
	struct lane *lanes;        // of a LAUNCH, its own
	int count;
	struct queued *done;       // of a LAUNCH, what is done
	result failed;             // of a LAUNCH: then the rest is not done
	int ran, joined;           // joined: the stream that began the capture has waited for it
	int64_t capture;           // that it is in
};

// What kernels/copies.cu takes. The kernel is made here, where none are executed: what
// others see of it is that the copies are made.
struct copies {
	uint64_t to[8], from[8];
	int bytes[8];
	int blocks;
};
static result copy_pieces(const struct copies *p, unsigned grid, const void *by) {
	int n = p->blocks > 0 ? (int)grid / p->blocks : 0;
	if (n < 1 || n > 8 || n * p->blocks != (int)grid) { defects++; say("defect: %u blocks for copies\n", grid); return INVALID_VALUE; }
	for (int i = 0; i < n; i++) {
		if (!p->bytes[i]) continue;
		enum kind from = HOST;
		for (struct object *o = all[BUFFER]; o; o = o->next)
			if (o->alive && p->from[i] - (uintptr_t)o->mem < (uint64_t)o->size) from = BUFFER;
		if (p->bytes[i] > p->blocks * 4096 || (p->to[i] | p->from[i] | (unsigned)p->bytes[i]) % 4) { defects++; say("defect: a copy of %d bytes\n", p->bytes[i]); return INVALID_VALUE; }
		if (!within(BUFFER, p->to[i], p->bytes[i], by) || !within(from, p->from[i], p->bytes[i], by)) return INVALID_VALUE;
	}
	for (int i = n - 1; i >= 0; i--) memcpy((void *)p->to[i], (void *)p->from[i], p->bytes[i]); // in any order
	return OK;
}

// draw is any number below n, by a state that is not 0.
static uint64_t draw_by(uint64_t *x, uint64_t n) {
	*x ^= *x << 13, *x ^= *x >> 7, *x ^= *x << 17;
	return *x % n;
}
static uint64_t draw(uint64_t n) { return draw_by(&f.late, n); }

// together says whether kernels run in turns: where GPUs reach each other, one may wait for
// another's.
static int together(void) {
	for (int i = 0; i < GPUS; i++)
		if (f.execute && f.turns && primaries[i].reach) return 1;
	return 0;
}
static uint64_t any(uint64_t n) { return together() ? draw_by(&f.turns, n) : f.late ? draw(n) : 0; }

static struct queued *on_gpu[GPUS]; // the kernel that has begun on a GPU, and not ended: it may need all of it
static int over;                    // kernels wait for what never comes: those that have begun end
static int abroad;                  // something waits for another process

// perform does a thing whose turn it is, in its lane. A kernel may not have ended then: NOT_READY, WAITS.
static result perform(struct queued *w, struct lane *lane) {
	struct object *s = w->by;
	int gpu = gpu_of(s->owner);
	int64_t overlap = w->overlap && lane->launched;
	result r = OK;
	switch (w->work) {
	case MARK: case WAIT: w->ran = 1; return OK;
	case KERNEL:
		if (!f.execute) r = strcmp(w->fn->name, "copy_pieces") ? OK : copy_pieces(w->argument, w->grid, s->owner);
		else {
			const void *turn = together() ? w : 0;
			r = (result)f.execute(w->fn->image, w->fn->name, w->grid, w->block, w->cluster, w->shared, overlap, w->argument, gpu, lane, turn, over);
			on_gpu[gpu] = r == NOT_READY || r == WAITS ? w : 0;
			if (on_gpu[gpu]) return r;
		}
		break;
	case COPY: memcpy(w->to, w->from, w->n); break;
	case SET: memset(w->to, w->set, w->n); break;
	case FOREIGN:
		r = ((result (*)(const void *))w->to)(w->from);
		if (r == WAITS) { abroad = 1; return r; }
		break;
	case LAUNCH: break; // its lanes are done
	}
	w->ran = 1;
	lane->launched = w->work == KERNEL;
	return r;
}

static void forget(struct queued *w) {
	if (w->work == MARK) return; // events may point to it
	free(w->argument), free(w);
}
static void forget_graph(struct queued *g) {
	for (int i = 0; i < g->count; i++)
		for (struct queued *w = g->lanes[i].first, *next; w; w = next) next = w->next, free(w->argument), free(w);
	for (struct queued *w = g->done, *next; w; w = next) next = w->next, free(w->argument), free(w);
	free(g->lanes);
}

// awaits says whether a WAIT has to wait. What was recorded in a capture never happens outside of it.
static int awaits(const struct queued *w, const struct queued *graph) { return !w->after->ran && (graph || !w->after->capture); }

// turn does the first thing of a lane, or some of it: DID, or else what it is that the lane waits for.
enum turned { DID, POLLS, BLOCKED };
static enum turned turn(struct lane *lane, struct queued *graph) {
	struct queued *w = lane->first;
	if (!w) return BLOCKED;
	if (graph && graph->failed && on_gpu[gpu_of(w->by->owner)] != w) w->ran = 1;
	else if (w->work == WAIT && awaits(w, graph)) return BLOCKED;
	else if (w->work == KERNEL && on_gpu[gpu_of(w->by->owner)] && on_gpu[gpu_of(w->by->owner)] != w) return BLOCKED;
	else if (w->work == LAUNCH && w->count) {
		int left = 0, from = (int)any(w->count);
		enum turned best = BLOCKED;
		for (int i = 0; i < w->count && best != DID; i++) {
			struct lane *l = &w->lanes[(from + i) % w->count];
			enum turned t = turn(l, w);
			if (t < best) best = t;
		}
		for (int i = 0; i < w->count; i++) left += w->lanes[i].first != 0;
		if (left) return best;
	}
	if (!w->ran) {
		result r = perform(w, lane);
		if (r == NOT_READY || r == WAITS) return r == WAITS ? POLLS : DID;
		if (w->work == LAUNCH) r = w->failed;
		if (r && graph) graph->failed = graph->failed ? graph->failed : r;
		else if (r && !lane->stream->failed) lane->stream->failed = r;
	}
	lane->first = w->next;
	if (!lane->first) lane->last = 0;
	if (graph) { w->next = graph->done, graph->done = w; return DID; }
	if (w->work == LAUNCH) forget_graph(w);
	forget(w);
	return DID;
}

// needed is the stream whose turn has to come for another to go on.
static struct object *needed(struct object *s) {
	for (int i = 0; i < 64 && s->todo.first && s->todo.first->work == WAIT && awaits(s->todo.first, 0); i++) s = s->todo.first->after->by;
	return s;
}
// everybody gives all streams a turn.
static enum turned everybody(void) {
	enum turned best = BLOCKED;
	int n = 0;
	for (struct object *o = streams; o; o = o->other) n++;
	int from = n ? (int)any(n) : 0, i = 0;
	for (int half = 0; half < 2; half++, i = 0)
		for (struct object *o = streams; o; o = o->other, i++) {
			if ((i >= from) == half || !o->todo.first) continue;
			enum turned t = turn(&o->todo, 0);
			if (t < best) best = t;
		}
	return best;
}

// That nobody does anything but wait is believed after so many turns: to look at all that it
// awaits takes a warp many, since each load has others go first, and its threads may be apart.
enum { IDLE = 1000 };

// until brings a stream on until it has done a thing; null: all that it has to do.
static void until(struct object *s, struct queued *w) {
	for (int idle = 0; s->todo.first && !(w && w->ran);) {
		abroad = 0;
		struct object *first = needed(s);
		enum turned t = turn(&first->todo, 0);
		if (together()) {
			enum turned e = everybody();
			t = e < t ? e : t;
		}
		if (t == DID) { idle = 0; continue; }
		if (abroad) { // as long as that takes, and no kernel's time passes
			if (++idle < 20) continue;
			pthread_mutex_unlock(&lock);
			usleep(100);
			pthread_mutex_lock(&lock);
			idle = 20;
			continue;
		}
		if (++idle > IDLE) { // all wait: see ptx.IdleTime. Another thread may have what they wait for
			f.clock += 50000000;
			pthread_mutex_unlock(&lock);
			usleep(1000);
			pthread_mutex_lock(&lock);
		}
		if (t == BLOCKED && idle > IDLE) { // a stream waits for itself
			defects++, say("defect: streams wait for each other\n");
			s->todo.first = s->todo.last = 0;
		} else if (idle > IDLE + 60 * 20) { // a minute
			over = 1;
			for (int i = 0; i < 64; i++) everybody();
			over = 0, idle = 0;
		}
	}
}
static result finish(struct object *s) {
	until(s, 0);
	result r = s->failed;
	s->failed = OK;
	return r;
}
// finish_all does all work of a context; null: of all.
static result finish_all(const void *context) {
	result r = OK;
	for (struct object *o = streams; o; o = o->other) {
		if (context && o->owner != context) continue;
		result e = finish(o);
		r = r ? r : e;
	}
	return r;
}
// some does a few things of any streams.
static void some(void) {
	if (together() && !any(3)) everybody();
	if (!f.late || draw(2)) return;
	for (struct object *o = streams; o; o = o->other)
		if (draw(3) == 0)
			for (uint64_t n = draw(4); n && o->todo.first; n--) turn(&o->todo, 0);
}
// later says whether work is not done when it is queued.
static int later(void) { return f.late || together(); }
// pinned says whether memory of the host is the driver's: it copies other memory at once.
static int pinned(const void *at) {
	for (int kind = BUFFER; kind <= HOST; kind++)
		for (struct object *o = all[kind]; o; o = o->next)
			if (o->alive && (uint64_t)((const char *)at - (const char *)o->mem) < (uint64_t)o->size) return 1;
	return 0;
}

// queue does it now, or at any time, or when the graph is launched that the stream makes.
// What graphs hold is given back with the process.
static result queue(struct object *stream, struct queued w) {
	int copies = w.fn && !strcmp(w.fn->name, "copy_pieces");
	w.by = stream;
	if (w.work == KERNEL && !f.execute && !copies) return OK;
	if (!f.execute && !f.late && w.work <= SET) return perform(&w, &stream->todo); // also in a capture
	if (!stream->capturing && together() && w.work == COPY && (!pinned(w.from) || !pinned(w.to))) {
		result r = finish(stream);
		return r ? r : perform(&w, &stream->todo);
	}
	if (!stream->capturing && !later()) {
		w.argument = (void *)w.from;
		if (w.work != LAUNCH && w.work != FOREIGN) return perform(&w, &stream->todo);
	}
	struct queued *kept = malloc(sizeof w);
	if (w.fn) {
		size_t n = copies ? sizeof(struct copies) : (size_t)f.execute(w.fn->image, w.fn->name, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
		w.argument = memcpy(malloc(n), w.from, n);
	}
	*kept = w;
	struct queued **first = &stream->todo.first, **last = &stream->todo.last;
	if (stream->capturing) {
		struct object *o = stream->origin ? stream->origin : stream;
		int i = 0;
		kept->capture = o->capture;
		while (o->lanes[i].stream != stream) i++;
		first = &o->lanes[i].first, last = &o->lanes[i].last;
	}
	if (*last) (*last)->next = kept;
	else *first = kept;
	*last = kept;
	return stream->capturing || later() ? OK : finish(stream);
}

// copy_lanes copies what a graph has: its nodes may be changed before it is done.
static struct lane *copy_lanes(const struct lane *from, int count) {
	struct lane *to = calloc(count, sizeof *to);
	for (int i = 0; i < count; i++) {
		to[i].stream = from[i].stream;
		for (struct queued *w = from[i].first; w; w = w->next) {
			struct queued *c = malloc(sizeof *c);
			*c = *w, c->next = 0, c->ran = 0;
			if (w->argument) {
				size_t n = !strcmp(w->fn->name, "copy_pieces") ? sizeof(struct copies) : (size_t)f.execute(w->fn->image, w->fn->name, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
				c->argument = memcpy(malloc(n), w->argument, n);
			}
			if (to[i].last) to[i].last->next = c;
			else to[i].first = c;
			to[i].last = c;
		}
	}
	// What is waited for is the copy of what was.
	for (int i = 0; i < count; i++)
		for (struct queued *w = to[i].first; w; w = w->next)
			for (int j = 0; w->work == WAIT && j < count; j++)
				for (struct queued *a = from[j].first, *b = to[j].first; a; a = a->next, b = b->next)
					if (a == w->after) { w->after = b; j = count - 1; break; }
	return to;
}

static struct object *make(enum kind kind) {
	struct object *o = calloc(1, sizeof *o);
	o->kind = kind, o->alive = 1, o->next = all[kind], o->owner = current;
	f.buffers += kind <= HOST;
	if (kind == STREAM) o->todo.stream = o, o->other = streams, streams = o;
	return all[kind] = o;
}

// bury frees an object's memory, and moves it to those that are freed.
static void bury(struct object *o) {
	struct object **at = &all[o->kind];
	while (*at != o) at = &(*at)->next;
	*at = o->next;
	if (o->mem && o->alive) free(o->mem);
	o->alive = 0, o->next = dead, dead = o;
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
	some();
	int here = !f.fail_on || (depth > 0 && gpu_of(current) == f.fail_on - 1);
	if ((f.fail_at && f.calls == f.fail_at) || (f.fail_in[0] && here && !strcmp(f.fail_in, name))) {
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
// The live memory that kernels can use, at most so many: addresses, bytes, and whose it is, a
// GPU's or, -1, the host's; how many there are.
int64_t fake_buffers(uint64_t *list, int64_t max) {
	int64_t n = 0;
	for (int kind = BUFFER; kind <= HOST; kind++)
		for (struct object *o = all[kind]; o; o = o->next)
			if (o->alive && n++ < max) *list++ = (uintptr_t)o->mem, *list++ = o->size, *list++ = o->kind == HOST ? -1 : gpu_of(o->owner);
	return n;
}
int fake_defects(void) { return defects; }
int fake_live(void) { // objects and retained contexts
	int n = 0;
	for (int i = 0; i < GPUS; i++) n += primaries[i].retained;
	for (int kind = 0; kind < KINDS; kind++)
		for (struct object *o = all[kind]; o && kind != FUNCTION; o = o->next) n += o->alive;
	return n;
}
void fake_reset(void) {
	for (int kind = 0; kind < KINDS; kind++) while (all[kind]) bury(all[kind]);
	for (struct object *o = dead, *next; o; o = next) {
		next = o->next;
		if (o->kind == MODULE) free(o->image);
		free(o);
	}
	dead = 0;
	streams = 0, over = 0;
	memset(on_gpu, 0, sizeof on_gpu);
	memset(&f, 0, sizeof f);
	f.version = 12040, f.devices = 2, f.major = 9, f.total = 1 << 20;
	memset(primaries, 0, sizeof primaries);
	used = 0, defects = 0;
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
result cuDeviceTotalMem_v2(size_t *n, int dev) { CALL(0); *n = total_of(dev - 40); return done(OK); }
result cuDeviceCanAccessPeer(int *can, int dev, int peer) { CALL(0); *can = dev != peer && !f.apart; return done(OK); }
result cuDeviceGetAttribute(int *v, int id, int dev) { CALL(0); *v = id == 75 ? f.major : id == 76 ? f.minor : id == 16 && f.sms ? f.sms : id == 97 && f.shared ? f.shared : 1000 + id; return done(OK); }
result cuDevicePrimaryCtxRetain(void **ctx, int dev) { CALL(0); primaries[dev - 40].retained++; *ctx = &primaries[dev - 40]; return done(OK); }
// Giving something back works even when it reports the failure of something
// earlier; so do calls that fail here on demand.
result cuDevicePrimaryCtxRelease_v2(int dev) {
	result r = begin(__func__, 0);
	struct primary *p = &primaries[dev - 40];
	if (--p->retained == 0) p->reach = 0;
	return done(r);
}
result cuCtxPushCurrent_v2(void *ctx) {
	CALL(0);
	if (!is_primary(ctx) || !((struct primary *)ctx)->retained) { defects++; say("defect: no such context\n"); return done(INVALID_CONTEXT); }
	pushed[depth++] = current = ctx;
	return done(OK);
}
result cuCtxPopCurrent_v2(void **ctx) {
	result r = begin(__func__, 1);
	if (depth > 0) depth--;
	current = depth ? pushed[depth - 1] : 0;
	return done(r);
}
result cuCtxSynchronize(void) { CALL(1); return done(finish_all(current)); }
// It is for the memory that there is, and all that will be.
result cuCtxEnablePeerAccess(void *peer, unsigned flags) {
	CALL(1);
	if (!is_primary(peer) || !((struct primary *)peer)->retained || !is_primary(current) || flags) { defects++; say("defect: no such context\n"); return done(INVALID_CONTEXT); }
	if (peer == current || f.apart) return done(INVALID_VALUE);
	struct primary *p = current;
	if (p->reach >> gpu_of(peer) & 1) return done(PEER_ACCESS_ALREADY_ENABLED);
	p->reach |= 1u << gpu_of(peer);
	return done(OK);
}

result cuMemGetInfo_v2(size_t *free, size_t *total) {
	CALL(1);
	int gpu = gpu_of(current);
	*free = total_of(gpu) - primaries[gpu].memory, *total = total_of(gpu);
	return done(OK);
}
result cuMemAlloc_v2(uint64_t *p, size_t n) {
	CALL(1);
	int gpu = gpu_of(current);
	if ((int64_t)n > total_of(gpu) - primaries[gpu].memory) return done(OUT_OF_MEMORY);
	struct object *o = make(BUFFER);
	o->mem = aligned_alloc(256, (n + 255) / 256 * 256), o->size = n, primaries[gpu].memory += n; // as a real one does
	memset(o->mem, 0xa5, n);
	*p = (uint64_t)(uintptr_t)o->mem;
	return done(OK);
}
static result give_back(const char *name, enum kind kind, uintptr_t id) {
	result r = begin(name, 1);
	struct object *o = find(kind, id);
	if (!o) return done(INVALID_HANDLE);
	if (kind == STREAM) {
		finish(o);
		struct object **at = &streams;
		while (*at != o) at = &(*at)->other;
		*at = o->other;
	}
	if (kind == BUFFER || kind == HOST || kind == MODULE) finish_all(o->owner); // they wait for work that may use it
	bury(o);
	f.buffers += kind <= HOST;
	if (kind == BUFFER) primaries[gpu_of(o->owner)].memory -= o->size;
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
	if (!find(STREAM, (uintptr_t)s) || !within(BUFFER, to, n, s->owner)) return done(INVALID_VALUE);
	return done(queue(s, (struct queued){ .to = (void *)to, .from = from, .n = n }));
}
result cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, struct object *s) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s) || !within(BUFFER, from, n, s->owner)) return done(INVALID_VALUE);
	return done(queue(s, (struct queued){ .to = to, .from = (void *)from, .n = n }));
}
result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, struct object *s) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s) || !within(BUFFER, from, n, s->owner) || !within(BUFFER, to, n, s->owner)) return done(INVALID_VALUE);
	return done(queue(s, (struct queued){ .to = (void *)to, .from = (void *)from, .n = n }));
}
result cuMemsetD8Async(uint64_t to, unsigned char v, size_t n, struct object *s) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s) || !within(BUFFER, to, n, s->owner)) return done(INVALID_VALUE);
	return done(queue(s, (struct queued){ .work = SET, .to = (void *)to, .n = n, .set = v }));
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
result cuStreamSynchronize(struct object *s) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s)) return done(INVALID_HANDLE);
	r = finish(s);
	s->todo.launched = 0;
	return done(r);
}
result cuStreamQuery(struct object *s) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s)) return done(INVALID_HANDLE);
	if (together()) everybody();
	return done(f.busy || s->todo.first ? NOT_READY : OK);
}
// Waiting for an event of a capture takes the stream to it.
result cuStreamWaitEvent(struct object *s, struct object *e, unsigned flags) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s) || !find(EVENT, (uintptr_t)e)) return done(INVALID_HANDLE);
	struct queued *m = e->mark;
	if (!m) return done(OK); // never recorded
	struct object *of = m->by->origin ? m->by->origin : m->by;
	if (!m->capture || !of->capturing || of->capture != m->capture) of = 0;
	if (s->capturing && of != (s->origin ? s->origin : s)) return done(CAPTURE_ISOLATION);
	if (of && !s->capturing) {
		if (of->count == GPUS) return done(INVALID_VALUE);
		s->capturing = 1, s->origin = of;
		of->lanes[of->count++] = (struct lane){ s };
	}
	if (of == s) m->joined = 1;
	return done(queue(s, (struct queued){ .work = WAIT, .after = m }));
}
result cuEventCreate(void **e, unsigned flags) { return simple(__func__, EVENT, e); }
result cuEventDestroy_v2(void *e) { return give_back(__func__, EVENT, (uintptr_t)e); }
// An event is recorded on streams of its own GPU.
result cuEventRecord(struct object *e, struct object *s) {
	CALL(1);
	if (!find(EVENT, (uintptr_t)e) || !find(STREAM, (uintptr_t)s)) return done(INVALID_HANDLE);
	if (is_primary(e->owner) && is_primary(s->owner) && e->owner != s->owner) { defects++; say("defect: an event of another GPU\n"); return done(INVALID_HANDLE); }
	struct queued w = { .work = MARK, .by = s };
	if (!s->capturing && !later()) {
		if (!e->mark || e->mark->capture) e->mark = malloc(sizeof w);
		*e->mark = w, e->mark->ran = 1;
		return done(OK);
	}
	queue(s, w);
	struct object *o = s->origin ? s->origin : s;
	e->mark = s->todo.last;
	for (int i = 0; s->capturing && i < o->count; i++)
		if (o->lanes[i].stream == s) e->mark = o->lanes[i].last;
	return done(OK);
}
result cuEventSynchronize(struct object *e) {
	CALL(1);
	if (!find(EVENT, (uintptr_t)e)) return done(INVALID_HANDLE);
	if (!e->mark) return done(OK);
	until(e->mark->by, e->mark);
	r = e->mark->by->failed;
	e->mark->by->failed = OK;
	return done(r);
}
result cuEventQuery(struct object *e) {
	CALL(1);
	if (!find(EVENT, (uintptr_t)e)) return done(INVALID_HANDLE);
	if (together()) everybody();
	return done(f.busy || (e->mark && !e->mark->ran) ? NOT_READY : OK);
}
result cuEventElapsedTime(float *ms, void *start, void *end) { *ms = 1.5f; return on(__func__, EVENT, start, EVENT, end); }

// fake_queue is for other libraries of this kind: it has a function called when its turn comes
// in a stream, which reads and writes memory of the GPU. As long as that is WAITS, for another process, it is called again.
int fake_queue(struct object *s, int (*f)(const void *), const void *with, uint64_t read, int64_t reads, uint64_t write, int64_t writes) {
	CALL(1);
	if (!find(STREAM, (uintptr_t)s) || !within(BUFFER, read, reads, s->owner) || !within(BUFFER, write, writes, s->owner)) return done(INVALID_VALUE);
	return done(queue(s, (struct queued){ .work = FOREIGN, .to = (void *)f, .from = with }));
}

// An image is the word "image" and names of kernels. A kernel's name says the
// sizes of its arguments: add_8_8_4.
result cuModuleLoadData(void **m, const char *image) {
	CALL(1);
	for (struct object *o = streams; together() && o; o = o->other) // it may have to wait for kernels
		if (o->owner == current) until(o, 0);
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
	if (o->image && f.execute(o->image, o->name, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) < 0) {
		bury(o);
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
	for (int j = 0; j < 14 && f.argument[j].bytes; j++) {
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
	return done(queue(s, (struct queued){ .work = KERNEL, .fn = fn, .grid = x, .block = tx, .cluster = 1, .shared = shared, .from = params[0] }));
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
	return done(queue(c->stream, (struct queued){ .work = KERNEL, .fn = fn, .grid = c->x, .block = c->tx, .cluster = cluster, .shared = c->shared, .overlap = overlap, .from = params[0] }));
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
	static int64_t captures;
	s->capturing = 1, s->capture = ++captures, s->by = pthread_self(), s->count = 1, s->lanes[0] = (struct lane){ s };
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
	int unjoined = 0;
	for (int i = 0; i < s->count; i++) {
		struct lane *l = &s->lanes[i];
		if (i) unjoined += !l->last->joined;
		l->stream->capturing = 0, l->stream->origin = 0;
	}
	if (r) return done(r);
	if (unjoined) return done(CAPTURE_UNJOINED);
	struct object *o = make(GRAPH);
	memcpy(o->lanes, s->lanes, sizeof s->lanes);
	o->count = s->count, *graph = o;
	return done(r);
}
result cuGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) {
	CALL(1);
	if (!find(GRAPH, (uintptr_t)graph)) return done(INVALID_HANDLE);
	struct object *o = make(EXEC);
	memcpy(o->lanes, ((struct object *)graph)->lanes, sizeof o->lanes);
	o->count = ((struct object *)graph)->count, *exec = o;
	return done(OK);
}
result cuGraphGetRootNodes(struct object *graph, void **nodes, size_t *n) {
	CALL(1);
	if (!find(GRAPH, (uintptr_t)graph)) return done(INVALID_HANDLE);
	struct queued *first = graph->lanes[0].first; // what other streams do is behind it
	// What another library queues may begin with things that depend on nothing: they come first here.
	size_t most = *n, count = 0;
	for (struct queued *w = first; w; w = w->next)
		if (w == first ? 0 : w->work == FOREIGN) { if (count < most) nodes[count] = w; count++; }
	if (first) { if (count < most) nodes[count] = first; count++; }
	*n = count < most ? count : most;
	return done(OK);
}
// The other texts of a node that can be had here are other copies.
struct node_params { struct object *fn; unsigned x, y, z, tx, ty, tz, shared; void **params, **extra; };
result cuGraphKernelNodeGetParams(struct queued *node, struct node_params *p) {
	CALL(1);
	if (node->work != KERNEL) return done(INVALID_VALUE);
	*p = (struct node_params){ .fn = node->fn, .x = (unsigned)node->grid, .tx = (unsigned)node->block, .shared = (unsigned)node->shared };
	return done(OK);
}
result cuGraphExecKernelNodeSetParams(struct object *exec, struct queued *node, const struct node_params *p) {
	CALL(1);
	if (!find(EXEC, (uintptr_t)exec) || !find(FUNCTION, (uintptr_t)p->fn) || p->extra) return done(INVALID_HANDLE);
	struct queued *w = exec->lanes[0].first;
	while (w && w != node) w = w->next;
	if (!w || w->fn != p->fn || strcmp(p->fn->name, "copy_pieces")) { defects++; say("defect: no such node\n"); return done(INVALID_VALUE); }
	say("grid %u %u %u block %u %u %u shared %u\n", p->x, p->y, p->z, p->tx, p->ty, p->tz, p->shared);
	memcpy(w->argument, p->params[0], sizeof(struct copies));
	w->grid = p->x, w->block = p->tx, w->shared = p->shared;
	return done(OK);
}
result cuGraphDestroy(void *g) { return give_back(__func__, GRAPH, (uintptr_t)g); }
result cuGraphExecDestroy(void *g) { return give_back(__func__, EXEC, (uintptr_t)g); }
result cuGraphLaunch(struct object *g, struct object *s) {
	CALL(1);
	if (!find(EXEC, (uintptr_t)g) || !find(STREAM, (uintptr_t)s)) return done(INVALID_HANDLE);
	return done(queue(s, (struct queued){ .work = LAUNCH, .lanes = copy_lanes(g->lanes, g->count), .count = g->count }));
}
