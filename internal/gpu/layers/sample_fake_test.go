//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package layers

import (
	"errors"
	"math"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/attn"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/leanattention/internal/gpu"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
	"gorgonia.org/leanattention/internal/reftest"
	"gorgonia.org/leanattention/kernels"
)

// The launch has the operands' addresses, wherever they are, and whole warps, of which the kernels have room for 128 a row.
func TestSampleLaunch(t *testing.T) {
	for _, f := range enginetest.Fakes {
		m, lib := fakeGPU(t, f.Capability, f.SMs, f.Shared)
		sampler, err := NewSampler(m.Dev)
		noError(t, err)
		for _, settings := range [][]Setting{nil, make([]Setting, 3)} {
			s := m.newSamples(t, [][]float32{{1, 2, 3}, {3, 2, 1}, {1, 3, 2}}, settings, make([]float64, 3), 2)
			lib.Forget()
			noError(t, sampler.Run(m.Stream, &s.Samples))
			want := sampleParams{logits: s.Logits.Buffer.Address() + 16, ids: s.IDs.Buffer.Address() + 16 + guard, stride: 5, vocab: 3}
			kernel := "sample_greedy"
			if settings != nil {
				want.settings, want.random = s.Settings.Buffer.Address()+16, s.Random.Buffer.Address()+16
				kernel = "sample_random"
			}
			if sampler.params != want {
				t.Errorf("%s: %+v, want %+v", f.Name, sampler.params, want)
			}
			all := enginetest.Launches(lib.Log())
			if len(all) != 1 || all[0].Kernel != kernel {
				t.Fatalf("%s: launches %+v of\n%s", f.Name, all, lib.Log())
			}
			clusters := f.Capability >= 90
			if l := all[0]; l.Overlap != clusters || clusters && (l.Cluster != 8 || l.Blocks != 24) || !clusters && (l.Cluster != 0 || l.Blocks != 3) {
				t.Errorf("%s: %+v", f.Name, l)
			}
			if l := all[0]; l.Threads%32 != 0 || l.Threads > 1024 || l.Threads/32*max(l.Cluster, 1) > 128 || l.Shared != 0 {
				t.Errorf("%s: %+v", f.Name, l)
			}
			m.Settle(t)
			s.close(t)
		}
		noError(t, m.Dev.Close())
	}
}

func TestSampleAllocates(t *testing.T) {
	if reftest.RaceEnabled {
		t.Skip("the race detector's instrumentation allocates")
	}
	m, lib := fakeGPU(t, 90, 13, 232448)
	sampler, err := NewSampler(m.Dev)
	noError(t, err)
	s := m.newSamples(t, [][]float32{{1, 2}}, make([]Setting, 1), make([]float64, 1), 0)
	run := func() { noError(t, sampler.Run(m.Stream, &s.Samples)) }
	run()
	if n := testing.AllocsPerRun(20, run); n != 0 {
		t.Errorf("%v allocations a launch", n)
	}
	lib.Forget()
	s.close(t)
}

func TestSampleErrors(t *testing.T) {
	m, lib := fakeGPU(t, 90, 13, 232448)
	sampler, err := NewSampler(m.Dev)
	noError(t, err)
	s := m.newSamples(t, [][]float32{make([]float32, 7), make([]float32, 7)}, make([]Setting, 2), make([]float64, 2), 1)
	lib.Forget()
	for _, c := range []struct {
		change   func(o *Samples)
		sentinel error
		text     string
	}{
		{func(o *Samples) { o.Rows = -1 }, attn.ErrShape, "-1 rows"},
		{func(o *Samples) { o.Rows = mostSampleRows + 1 }, attn.ErrShape, "rows"},
		{func(o *Samples) { o.Rows = 3 }, attn.ErrShape, "the logits"},
		{func(o *Samples) { o.Vocab = 0 }, attn.ErrShape, "a vocabulary of 0"},
		{func(o *Samples) { o.Vocab, o.Stride = MostVocab+1, MostVocab+1 }, attn.ErrShape, "a vocabulary of"},
		{func(o *Samples) { o.Stride = 6 }, attn.ErrShape, "rows of 7 logits are 6 apart"},
		{func(o *Samples) { o.Stride = math.MaxInt }, attn.ErrShape, "the logits"},
		{func(o *Samples) { o.Logits.Buffer = nil }, attn.ErrShape, "the logits"},
		{func(o *Samples) { o.Logits.Offset = 4 }, attn.ErrShape, "the logits"},
		{func(o *Samples) { o.Logits.Len-- }, attn.ErrShape, "the logits"},
		{func(o *Samples) { o.Logits.DType = attn.Float16 }, attn.ErrDType, "the logits are float16"},
		{func(o *Samples) { o.Logits.DType = attn.Float64 }, attn.ErrDType, "the logits is float64"},
		{func(o *Samples) { o.IDs.Buffer = nil }, attn.ErrShape, "the ids"},
		{func(o *Samples) { o.IDs.Offset = -16 }, attn.ErrShape, "the ids"},
		{func(o *Samples) { o.IDs.Offset = 8 }, attn.ErrShape, "the ids"},
		{func(o *Samples) { o.IDs.Offset = o.IDs.Buffer.Len() - 4 }, attn.ErrShape, "the ids"},
		{func(o *Samples) { o.IDs.Offset = math.MaxInt64 }, attn.ErrShape, "the ids"},
		{func(o *Samples) { o.Settings.Offset += 16 }, attn.ErrShape, "the settings"},
		{func(o *Samples) { o.Random.Buffer = nil }, attn.ErrShape, "the random numbers"},
		{func(o *Samples) { o.Random.Offset += 16 }, attn.ErrShape, "the random numbers"},
	} {
		o := s.Samples
		c.change(&o)
		err := sampler.Run(m.Stream, &o)
		wantError(t, c.text, err, c.sentinel, c.text)
		if err != nil && !strings.HasPrefix(err.Error(), "gpu: sample: ") {
			t.Errorf("%v", err)
		}
	}
	o := s.Samples
	o.Rows = 0
	o.Logits, o.IDs = gpu.Memory{}, gpu.Bytes{}
	noError(t, sampler.Run(m.Stream, &o))
	if lib.Log() != "" {
		t.Errorf("something was queued:\n%s", lib.Log())
	}

	gone, err := m.Dev.NewBuffer(256)
	noError(t, err)
	noError(t, gone.Close())
	o = s.Samples
	o.IDs.Buffer = gone
	o.IDs.Offset = 0
	wantError(t, "closed ids", sampler.Run(m.Stream, &o), cuda.ErrClosed, "")
	s.close(t)
}

// The kernels are loaded with the first sampler, and once.
func TestSampleModule(t *testing.T) {
	m, lib := fakeGPU(t, 90, 13, 232448)
	if n := strings.Count(lib.Log(), "ModuleLoadData"); n != 2 {
		t.Errorf("%d modules without a sampler", n)
	}
	real := gpu.Image
	gpu.Image = func(string, int) ([]byte, error) { return nil, kernels.ErrNoImage }
	_, err := NewSampler(m.Dev)
	gpu.Image = real
	if !errors.Is(err, kernels.ErrNoImage) {
		t.Errorf("no image: %v", err)
	}
	for range 3 {
		_, err := NewSampler(m.Dev)
		noError(t, err)
	}
	if n := strings.Count(lib.Log(), "ModuleLoadData"); n != 3 {
		t.Errorf("%d modules with samplers", n)
	}
}
