package leanattention_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"sync"
	"testing"
	"time"

	"gorgonia.org/leanattention/device"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/graphtest"
	"gorgonia.org/leanattention/internal/reftest"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// Whatever is asked of a GPU, and of all that is on it, by a function that this package calls is done or refused, and
// waits for nothing that ends with the function: while a recording is made, by the writer and the reader of a sequence, and
// in the loop of Chunks. The cache is consistent behind all of them.
func TestCallsWithinCallbacks(t *testing.T) {
	type world struct {
		gpu       *device.GPU
		cache     *la.Cache
		seq, fork *la.Sequence
		open, set *la.Step
		x         *device.Tensor
		recording *device.Recording
		saved     []byte
	}
	made := false
	t.Run("GPU", func(t *testing.T) {
		la.FakeGPU(t)
		made = true
	})
	if !made {
		t.Skip("no GPU of tests")
	}
	build := func(t *testing.T) *world {
		gpu, _ := la.FakeGPU(t)
		w := &world{gpu: gpu, cache: graphtest.NewCache(t, la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: 64, PageSize: 4, Pages: 16, Device: gpu})}
		d := graphtest.NewDecoder(t, w.cache, 2, 1, tensor.Float32, true)
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		stored := graphtest.NewStored(t, w.cache)
		w.seq = stored.Seq
		d.Do(t, reftest.Rand(t), reftest.Normal, graphtest.Appended{To: stored, Tokens: 2})
		var err error
		w.fork, err = w.seq.Fork()
		must(err)
		w.open, err = w.cache.NewStep(2)
		must(err)
		w.set, err = w.cache.NewStep(2)
		must(err)
		other, err := w.cache.NewSequence()
		must(err)
		must(w.set.Set([]la.Append{{Seq: other, Tokens: 1}}))
		w.x, err = gpu.NewTensor(tensor.Float32, 2, 3)
		must(err)
		w.recording, err = gpu.Record(func() error { return nil })
		must(err)
		var b bytes.Buffer
		_, err = w.seq.WriteTo(&b)
		must(err)
		w.saved = b.Bytes()
		return w
	}
	callbacks := map[string]func(w *world, f func()) error{
		"Record": func(w *world, f func()) error {
			r, err := w.gpu.Record(func() error { f(); return nil })
			return errors.Join(err, r.Close())
		},
		"WriteTo": func(w *world, f func()) error {
			return second(w.seq.WriteTo(writerFunc(func(p []byte) (int, error) { f(); return len(p), nil })))
		},
		"ReadSequence": func(w *world, f func()) error {
			from := bytes.NewReader(w.saved)
			return second(w.cache.ReadSequence(readerFunc(func(p []byte) (int, error) { f(); return from.Read(p) })))
		},
		"Chunks": func(w *world, f func()) error {
			for range la.Chunks(1, []la.Append{{Seq: w.seq, Tokens: 1}}) {
				f()
			}
			return nil
		},
	}
	within := map[string]error{ // Record
		"Close of *device.GPU": la.ErrState, "Close of *leanattention.Cache": la.ErrState, "Replay of *device.Recording": la.ErrState,
		"Record of *device.GPU": la.ErrState, "Set of *leanattention.Step": la.ErrState, "Synchronize of *device.GPU": la.ErrUnsupported,
		"Download of *device.Tensor": la.ErrUnsupported, "Upload of *device.GPU": la.ErrUnsupported,
		"WriteTo of *leanattention.Sequence": la.ErrUnsupported, "ReadSequence of *leanattention.Cache": la.ErrUnsupported,
		"CopyFrom of *device.Tensor": la.ErrUnsupported, "UploadReplicated of *device.GPU": la.ErrUnsupported, "UploadSharded of *device.GPU": la.ErrUnsupported,
	}
	dense := tensor.New(tensor.WithShape(2, 3), tensor.WithBacking(make([]float32, 6)))
	x := G.NewMatrix(G.NewGraph(), tensor.Float32, G.WithShape(2, 3), G.WithName("x"))
	objects := func(w *world) []any { return []any{w.gpu, w.cache, w.seq, w.fork, w.open, w.set, w.x, w.recording} }
	for callback, with := range callbacks {
		t.Run(callback, func(t *testing.T) {
			refused := map[string]bool{}
			for i := range objects(new(world)) {
				var names []string
				for name := range methodsOf(objects(new(world))[i], nil) {
					names = append(names, name)
				}
				for _, method := range names {
					name := fmt.Sprintf("%s of %T", method, objects(new(world))[i])
					t.Run(name, func(t *testing.T) {
						w := build(t)
						object := objects(w)[i]
						arguments := []any{dense, 1, tensor.Float32, []la.Append{{Seq: w.fork, Tokens: 1}}, []int{0}, func() error { return nil }, x, bytes.NewReader(w.saved), io.Discard}
						call := maps.Collect(methodsOf(object, arguments))[method]
						var inside error
						done, once := make(chan error, 1), sync.Once{}
						go func() {
							done <- with(w, func() { once.Do(func() { _, inside = call() }) })
						}()
						select {
						case err := <-done:
							if errors.Is(inside, la.ErrInternal) || errors.Is(err, la.ErrInternal) {
								t.Errorf("%v; %s: %v", inside, callback, err)
							}
						case <-time.After(time.Minute):
							t.Fatal("it waits")
						}
						if want := within[name]; callback == "Record" && want != nil {
							if errors.Is(inside, want) {
								refused[name] = true
							} else {
								t.Errorf("%v, want %v", inside, want)
							}
						}
						if err := w.cache.Check(); err != nil && !errors.Is(err, la.ErrClosed) {
							t.Error(err)
						}
						if err := w.recording.Close(); err != nil {
							t.Error(err)
						}
					})
				}
			}
			for name := range within {
				if callback == "Record" && !refused[name] {
					t.Errorf("%s was not refused", name)
				}
			}
		})
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

type readerFunc func(p []byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }
