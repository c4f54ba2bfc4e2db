package leanattention

import (
	"errors"
	"math"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/memory"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// NewCache refuses what no computer has, and what this one has not, instead of letting
// make panic or the system end the process.
func TestNewCacheBeyondMemory(t *testing.T) {
	for _, c := range []struct {
		config CacheConfig
		want   error
	}{
		{CacheConfig{Layers: 1, KVHeads: 1 << 20, HeadDim: 1 << 20, PageSize: 1 << 9, Pages: 1}, ErrOutOfMemory},
		{CacheConfig{Layers: 1 << 30, KVHeads: 1 << 30, HeadDim: 1 << 30, PageSize: 1 << 30, Pages: 1 << 30}, ErrShape},
		{CacheConfig{Layers: math.MaxInt32, KVHeads: 1, HeadDim: math.MaxInt32, PageSize: 1, Pages: 1}, ErrShape},
		{CacheConfig{Layers: 12, KVHeads: 12, HeadDim: 64, PageSize: 64, Pages: 580_000}, ErrOutOfMemory}, // 2.7 TB
		{CacheConfig{Layers: math.MaxInt32, KVHeads: 1, HeadDim: 1, PageSize: 1, Pages: 1}, ErrOutOfMemory},
	} {
		if math.MaxInt == math.MaxInt32 { // no address has so many
			c.want = ErrShape
		}
		if c.want == ErrOutOfMemory {
			if f, known := memory.Now(); !known || f.Total > 1<<37 {
				continue
			}
		}
		if _, err := NewCache(c.config); !errors.Is(err, c.want) {
			t.Errorf("%+v: %v, want %v", c.config, err, c.want)
		}
	}
}

// A cache takes what is free, to the byte, and what CacheConfig.Bytes says.
func TestNewCacheFree(t *testing.T) {
	config := smallCache
	bytes, err := config.Bytes()
	noError(t, err)
	if want := int64(3 * 12 * 2 * 4 * (4 + 3) * 4); bytes != want {
		t.Errorf("%d bytes, want %d", bytes, want)
	}
	var free int64
	defer memory.Replace(func() (memory.Free, bool) { return memory.Free{Bytes: free, Total: 1 << 20, Of: "a test"}, true })()
	free = bytes + 8*12 + 64*3 // what says who has which page
	c, err := NewCache(config)
	noError(t, err)
	if got := c.bytes; got != bytes {
		t.Errorf("%d bytes, and Bytes said %d", got, bytes)
	}
	free--
	_, err = NewCache(config)
	if !errors.Is(err, ErrOutOfMemory) {
		t.Fatal(err)
	}
	for _, text := range []string{"NewCache: 8352 bytes for 3 layers of 12 pages of 4 tokens, 2 KV heads of 4 and 3, float32, in host memory", "8351 of 1048576 bytes of a test are free"} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%q does not say %q", err, text)
		}
	}
	defer memory.Replace(func() (memory.Free, bool) { return memory.Free{}, false })() // a system that does not tell
	_, err = NewCache(config)
	noError(t, err)

	config.DType = Float16
	if half, err := config.Bytes(); err != nil || half != bytes/2 {
		t.Errorf("float16: %d bytes, %v", half, err)
	}
	config.DType = tensor.Float64
	if _, err := config.Bytes(); !errors.Is(err, ErrDType) || !strings.Contains(err.Error(), "CacheConfig.Bytes") {
		t.Error(err)
	}
	if _, err := (CacheConfig{}).Bytes(); !errors.Is(err, ErrShape) {
		t.Error(err)
	}
}

// In steady state Set, Commit and Run allocate nothing, whatever mix they are given.
func TestStepDoesNotAllocate(t *testing.T) {
	c := newTestCache(t, CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 8, PageSize: 4, Pages: 64})
	s := newStepGraph(t, c, 16, 4, tensor.Float32, WithCausal())
	defer s.close()
	var sequences []*Sequence
	var appends []Append
	for i := range 5 {
		sequences = append(sequences, newTestSequence(t, c))
		appends = append(appends, Append{Seq: sequences[i], Tokens: 1 + i%3})
	}
	in := make([]layerInput, 2)
	rng := reftest.Rand(t)
	for l := range in {
		in[l] = s.draw(rng, l, nil)
	}
	var inSteps uint64
	var before, after runtime.MemStats
	counted := func(f func() error) {
		runtime.ReadMemStats(&before)
		err := f()
		runtime.ReadMemStats(&after)
		inSteps += after.Mallocs - before.Mallocs
		noError(t, err)
	}
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // so that nobody else allocates
	const steps = 400
	for i := range 2 * steps {
		if i == steps { // grown by now
			inSteps = 0
		}
		counted(func() error { return s.step.Set(appends) })
		noError(t, s.runLayer(0, in[0]), s.runLayer(1, in[1]))
		counted(s.step.Commit)
		if i%3 == 0 {
			counted(func() error { return s.step.Set(appends) })
			counted(s.step.Rollback)
			counted(func() error {
				if err := s.step.Run(appends, func() error { return errFault }); err != errFault {
					return err
				}
				return s.step.Run(nil, func() error { return nil })
			})
		}
		for _, q := range sequences { // the contexts wax and wane
			if q.Len() > 30 {
				noError(t, q.Truncate(i%17))
			}
		}
	}
	if inSteps > steps/20 { // the runtime itself allocates now and then
		t.Errorf("%d allocations in %d steps", inSteps, steps)
	}
}

// collected returns the memory in use. The second collection frees the objects of pools, which the first one keeps.
func collected() (m runtime.MemStats) {
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m
}

// A graph that runs for thousands of steps takes no more memory and no more
// goroutines.
func TestDecodeDoesNotGrow(t *testing.T) {
	rng := reftest.Rand(t)
	c := newTestCache(t, CacheConfig{Layers: 2, KVHeads: 2, HeadDim: 8, PageSize: 16, Pages: 64})
	s := newStepGraph(t, c, 4, 4, tensor.Float32, WithCausal())
	defer s.close()
	var appends []testAppend
	var tokens []*testToken
	for range 4 {
		appends = append(appends, testAppend{&testContext{seq: newTestSequence(t, c)}, 1})
		tokens = append(tokens, newTestTokens(1, 2)...)
	}
	in := []layerInput{s.draw(rng, 0, tokens), s.draw(rng, 1, tokens)}
	decode := func(steps int) (objects, goroutines int) {
		for range steps {
			noError(t, set(s, appends...), s.run(in, 0), s.step.Commit())
			if appends[0].seq.Len() == 200 {
				for _, a := range appends {
					noError(t, a.seq.Truncate(3))
				}
			}
		}
		return int(collected().HeapObjects), runtime.NumGoroutine()
	}
	objects, goroutines := decode(200)
	objectsAfter, goroutinesAfter := decode(1500)
	if objectsAfter > objects+300 {
		t.Errorf("%d objects after 200 steps, %d after 1700", objects, objectsAfter)
	}
	if goroutinesAfter > goroutines+runtime.GOMAXPROCS(0) {
		t.Errorf("%d goroutines after 200 steps, %d after 1700", goroutines, goroutinesAfter)
	}
	t.Logf("objects %d, %d; goroutines %d, %d", objects, objectsAfter, goroutines, goroutinesAfter)
	if n := s.step.layers; n != 2*1700 {
		t.Errorf("%d layers have run, want 3400", n)
	}
}

// What the limits of a process do not leave is ErrOutOfMemory, of caches and of what nodes make. Go would end the process, so
// another one does that.
func TestMemoryLimit(t *testing.T) {
	if runtime.GOOS != "linux" || math.MaxInt == math.MaxInt32 || reftest.RaceEnabled {
		t.Skip("the limits are those of Linux with addresses of 64 bits, of which the race detector takes terabytes")
	}
	const child = "LEANATTENTION_TEST_LIMIT"
	if os.Getenv(child) == "" {
		for _, limit := range []string{"-v 8000000", "-d 7000000"} {
			c := exec.Command("sh", "-c", "ulimit "+limit+` && exec "$0" -test.run '^TestMemoryLimit$' -test.v`, os.Args[0])
			c.Env = append(os.Environ(), child+"=1")
			if out, err := c.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
				t.Errorf("ulimit %s: %v\n%.3000s", limit, err, out)
			}
		}
		return
	}
	refused := func(err error) {
		t.Helper()
		if !errors.Is(err, ErrOutOfMemory) || !strings.Contains(err.Error(), "(ulimit ") {
			t.Errorf("%v", err)
		}
	}
	config := CacheConfig{Layers: 4, KVHeads: 8, HeadDim: 128, Pages: 8192}
	_, err := NewCache(config)
	refused(err)
	if config.Pages = 2500; config.PageSize != 0 {
		t.Fatal(config)
	}
	for range 3 { // 5 GB each, which Close gives back
		c, err := NewCache(config)
		if err != nil {
			t.Fatal(err)
		}
		_, err = NewCache(config)
		refused(err)
		noError(t, c.Close())
	}

	// q and v are small, and what they make has 6.4 GB and more.
	const n = 40_000
	input := func(g *G.ExprGraph, name string, shape ...int) *G.Node {
		return G.NewTensor(g, tensor.Float32, len(shape), G.WithShape(shape...), G.WithName(name), G.WithValue(tensor.New(tensor.Of(tensor.Float32), tensor.WithShape(shape...))))
	}
	g := G.NewGraph()
	out, err := Attention(input(g, "q", 1, 1, n, 1), input(g, "k", 1, 1, 1, 1), input(g, "v", 1, 1, 1, n))
	noError(t, err)
	m := G.NewTapeMachine(g)
	defer m.Close()
	refused(Cause(m.RunAll()))
	if out.Value() != nil {
		t.Error("there is an output")
	}
	// The same of a step, which can be rolled back.
	const rows, heads, dim = 4000, 4096, 100
	c, err := NewCache(CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 1, ValueDim: dim, PageSize: 4, Pages: rows / 4})
	noError(t, err)
	s, err := c.NewSequence()
	noError(t, err)
	step, err := c.NewStep(rows)
	noError(t, err)
	g = G.NewGraph()
	_, err = CachedAttention(input(g, "q", rows, heads), input(g, "k", rows, 1), input(g, "v", rows, dim), step.Layer(0))
	noError(t, err)
	cached := G.NewTapeMachine(g)
	defer cached.Close()
	noError(t, step.Set([]Append{{Seq: s, Tokens: rows}}))
	refused(Cause(cached.RunAll()))
	noError(t, step.Rollback(), s.Release(), c.Close())
}
