//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package leanattention_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	la "gorgonia.org/leanattention"
	"gorgonia.org/leanattention/internal/cuda/fakedriver"
	"gorgonia.org/leanattention/nn"

	G "gorgonia.org/gorgonia"
	"gorgonia.org/tensor"
)

// decodeOnGPU loads a decoder of one layer, runs a step of it node by node,
// records the next one and replays it some times, all on a GPU. Then it calls
// done, and gives everything back.
func decodeOnGPU(gpu *la.GPU, replays int, done func()) (err error) {
	const width, vocab, rows = 128, 40, 2 // as layers can be put in a chain
	var closers []func() error
	defer func() {
		done()
		for i := len(closers) - 1; i >= 0; i-- {
			if e := closers[i](); e != nil && !errors.Is(e, la.ErrClosed) && err == nil {
				err = e
			}
		}
	}()
	g := G.NewGraph()
	let := func(name string, d *la.DeviceTensor) *G.Node {
		closers = append(closers, d.Free)
		return G.NewTensor(g, d.Dtype(), len(d.Shape()), G.WithShape(d.Shape()...), G.WithName(name), G.WithValue(d))
	}
	var failed error
	weight := func(name string, shape ...int) *G.Node {
		if failed != nil {
			return nil
		}
		of := la.Float16
		if len(shape) == 1 {
			of = tensor.Float32
		}
		var d *la.DeviceTensor
		if d, failed = gpu.NewTensor(of, shape...); failed != nil {
			return nil
		}
		return let(name, d)
	}
	table, wq, wk, wv := weight("table", vocab, width), weight("wq", width, width), weight("wk", width, width), weight("wv", width, width)
	wo, wh := weight("wo", width, width), weight("wh", width, width)
	gamma, bias := weight("gamma", width), weight("bias", width)
	if failed != nil {
		return failed
	}
	tokens, err := gpu.NewTensor(tensor.Int32, rows)
	if err != nil {
		return err
	}
	ids := let("tokens", tokens)

	cache, err := la.NewCache(la.CacheConfig{Layers: 1, KVHeads: 1, HeadDim: width, DType: la.Float16, PageSize: 4, Pages: 40, Device: gpu})
	if err != nil {
		return err
	}
	closers = append(closers, cache.Close)
	step, err := cache.NewStep(rows)
	if err != nil {
		return err
	}
	var appends []la.Append
	for range rows {
		seq, err := cache.NewSequence()
		if err != nil {
			return err
		}
		appends = append(appends, la.Append{Seq: seq, Tokens: 1})
	}

	h, err := nn.Embedding(table, ids, nil)
	if err != nil {
		return err
	}
	qkv, err := nn.Linears(h, []*G.Node{wq, wk, wv}, nil, nn.WithNorm(gamma, nil, 1e-5))
	if err != nil {
		return err
	}
	a, err := la.CachedAttention(qkv[0], qkv[1], qkv[2], step.Layer(0), la.WithCausal())
	if err != nil {
		return err
	}
	h, err = nn.Linear(a, wo, bias, nn.WithReLU(), nn.WithResidual(h))
	if err != nil {
		return err
	}
	if h, err = nn.Linear(h, wh, nil); err != nil {
		return err
	}
	if h, err = nn.LayerNorm(h, gamma, nil, 1e-5); err != nil {
		return err
	}
	logits, err := nn.Linear(h, table, nil)
	if err != nil {
		return err
	}
	chosen, err := nn.ArgMax(logits)
	if err != nil {
		return err
	}
	vm := G.NewTapeMachine(g)
	closers = append(closers, vm.Close)
	run := func() error { defer vm.Reset(); return vm.RunAll() }
	turn := func(run func() error) error {
		if err := tokens.CopyFrom(tensor.New(tensor.WithShape(rows), tensor.WithBacking([]int32{3, 5}))); err != nil {
			return err
		}
		if err := step.Set(appends); err != nil {
			return err
		}
		if err := run(); err != nil {
			return errors.Join(err, step.Rollback())
		}
		return step.Commit()
	}
	if err := turn(run); err != nil {
		return err
	}
	var rec *la.Recording
	if err := turn(func() (err error) {
		if rec, err = gpu.Record(run); err != nil {
			return err
		}
		return rec.Replay()
	}); err != nil {
		return errors.Join(err, rec.Close())
	}
	closers = append(closers, rec.Close)
	for range replays {
		if err := turn(rec.Replay); err != nil {
			return err
		}
	}
	if _, err := chosen.Value().(*la.DeviceTensor).Download(); err != nil {
		return err
	}
	for _, a := range appends {
		if n := a.Seq.Len(); n != replays+2 {
			return fmt.Errorf("%d tokens after %d steps", n, replays+2)
		}
	}
	return nil
}

// Whatever call of the driver fails, a load and a step of a decoder are an error,
// and nothing of them stays.
func TestDecoderFaults(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("hundreds of decoders")
	}
	deviceFaults(t, func(t *testing.T, gpu *la.GPU, lib *fakedriver.Library) error {
		// What is closed counts as closed whatever the driver says, and then it is
		// the context's.
		return decodeOnGPU(gpu, 2, func() { lib.State().FailAt = 0 })
	})
}

// Steps take no memory, and are one launch each.
func TestDecoderStepsTakeNoMemory(t *testing.T) {
	gpu, lib := la.FakeGPU(t)
	used := func() int64 {
		m, err := gpu.Memory()
		if err != nil {
			t.Fatal(err)
		}
		return m.Used + m.Pinned
	}
	if err := decodeOnGPU(gpu, 1, func() {}); err != nil {
		t.Fatal(err)
	}
	first := used()
	// Two layers behind each other are one launch; the engine that tests have here
	// knows of no chains.
	if n := strings.Count(lib.Log(), "kernel chain_f16_64"); n != 1 {
		t.Errorf("%d chains in a recording", n)
	}
	lib.Forget()
	if err := decodeOnGPU(gpu, 70, func() {}); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(lib.Log(), "cuGraphLaunch"); n != 71 {
		t.Errorf("%d graph launches in 71 steps", n)
	}
	if now := used(); now > 3*first {
		t.Errorf("%d bytes used after 72 steps, %d after 3", now, first)
	}
}
