//go:build linux && !android && !faketime && (amd64 || arm64) && !nogpu

package e2e

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/cuda"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
	"gorgonia.org/leanattention/internal/gpu/enginetest"
)

// TestWhole: a prompt and steps in the middle of what follows it, by ours, by ours with another schedule and by transformers.
func TestWhole(t *testing.T) {
	defer func(f func(string) (*measure.Worker, error)) { startDecoderWorker = f }(startDecoderWorker)
	defer func(f func(shape, int) (decoder, error)) { openGPU = f }(openGPU)
	var asked *measure.Worker
	startDecoderWorker = func(string) (_ *measure.Worker, err error) {
		asked, err = measure.Start(measuretest.Command(t, "opt"))
		return asked, err
	}
	openGPU = func(c shape, _ int) (decoder, error) {
		if c.positions() != 9217 {
			t.Errorf("%d positions", c.positions())
		}
		return fixedDecoder{fixed{0.1, 2e-3, []string{"1"}}, 1 << 20, new(bool)}, nil
	}
	for prompt, peers := range map[int]bool{8192: true, 16384: false} {
		w, err := OpenWhole(WholeOPT, 9217, "", true, 2, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		if hello, without := w.Said(); hello != "Fake 1.0" || without != nil {
			t.Errorf("%q, %q", hello, without)
		}
		all, err := w.Measure(prompt, 1024)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Error(err)
		}
		// Ours takes half a microsecond for each token of a prompt, and the fake transformers 4 ms for all.
		want := []struct {
			name         string
			prompt, step float64
		}{{WholeLean, 0.5e-6 * float64(prompt), 2e-3}, {WholeFixed, 0.5e-6 * float64(prompt), 3e-3}, {WholeTorch, 4e-3, 4e-3}}
		if !peers {
			want = want[:2]
		}
		if len(all) != len(want) {
			t.Fatalf("%d tokens: %+v", prompt, all)
		}
		for i, x := range want {
			if got := all[i]; got.Name != x.name || !measuretest.Near(got.Prompt.Median(), x.prompt) || !measuretest.Near(got.Step.Median(), x.step) {
				t.Errorf("%d tokens: %+v, want %+v", prompt, got, x)
			}
		}
		if said := strings.Contains(asked.Stderr.Text(), "read compiled 1 8704 32"); said != peers {
			t.Errorf("the worker was asked for%s", asked.Stderr.Text())
		}
	}
	// Transformers that end are left out of that prompt, and are there for the next.
	startDecoderWorker = func(string) (*measure.Worker, error) { return measure.Start(measuretest.Command(t, "opt-dies")) }
	dies, err := OpenWhole(WholeOPT, 9217, "", true, 2, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for prompt, want := range map[int][]string{4096: nil, 8192: {`8192 tokens: "prompt 1 8192": the worker has ended`}} {
		for range 2 {
			all, err := dies.Measure(prompt, 1024)
			if _, without := dies.Said(); err != nil || len(all) != 3-len(want) || !slices.Equal(without, want) || !measuretest.Near(all[0].Step.Median(), 2e-3) {
				t.Errorf("%d tokens: %+v, %v; %q", prompt, all, err, without)
			}
		}
	}
	if err := dies.Close(); err != nil && !strings.Contains(err.Error(), "exit status 4") {
		t.Error(err)
	}
	startDecoderWorker = func(string) (*measure.Worker, error) { return nil, errors.New("no such python") }
	w, err := OpenWhole(WholeOPT, 9217, "", true, 2, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if _, without := w.Said(); len(without) != 1 || without[0] != "no such python" {
		t.Errorf("%q", without)
	}
	if _, without := w.Said(); without != nil {
		t.Errorf("%q", without)
	}
	if _, err := OpenWhole("GPT", 9, "", true, 2, io.Discard); err == nil || !strings.Contains(err.Error(), `no decoder is called "GPT"`) {
		t.Errorf("error %v", err)
	}
	if all, err := w.Measure(1024, 128); err != nil || len(all) != 2 {
		t.Errorf("%+v, %v", all, err)
	}
}

// TestFakeE2E goes through the whole e2e command on a GPU, but for our decoder.
func TestFakeE2E(t *testing.T) {
	for how, capability := range map[string]int32{"opt": 90, "opt-differs": 80} {
		lib := enginetest.Stub(t, capability)
		defer gpu.UseDriver(func() (*cuda.Driver, error) { return cuda.LoadFrom(lib.Path) }, enginetest.PrepareModules)()
		defer func(f func(string) (*measure.Worker, error)) { startDecoderWorker = f }(startDecoderWorker)
		defer func(f func(shape, int) (decoder, error)) { openGPU = f }(openGPU)
		var asked *measure.Worker
		startDecoderWorker = func(string) (*measure.Worker, error) {
			w, err := measure.Start(measuretest.Command(t, how))
			asked = w
			return w, err
		}
		openGPU = func(c shape, chunk int) (decoder, error) {
			if c.fields["num_hidden_layers"] == 24 {
				return nil, errors.New("no room")
			}
			return fixedDecoder{fixed{0.1, 2e-3, []string{"1"}}, 16384, new(bool)}, nil
		}
		prompts, err := promptCasesOf(t, "-shapes=1.3b,6.7b", "-prompts=1x2048,16x512")
		if err != nil || len(prompts) != 4 {
			t.Fatalf("%v, %v", prompts, err)
		}
		cases, err := gpuCasesOf(t, "-shapes=1.3b,6.7b", "-long=16384,8192", "-batches=1", "-steps=8")
		if err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		b := &e2eGPU{
			Bench:  gpu.NewBench(gpu.Options{Peers: true}, measure.Machine{}, &out, io.Discard),
			rounds: 3, mixed: how == "opt-differs", ceiling: gpu.EvenShape(1, 2, 2, 1<<14, 64),
		}
		err = b.run(cases, prompts)
		// What fails does not keep the rest from being measured.
		if want := "OPT-1.3b: no room\nOPT-1.3b: no room\nOPT-6.7b: b1, behind 16384 tokens: " + b.name() + ": too long"; err == nil || err.Error() != want {
			t.Errorf("error %v, want %s", err, want)
		}
		cases = []stepCase{cases[1], cases[3]}
		for _, want := range []string{"GPU 0: ", "Fake 1.0", "### " + cases[0].table(), "| b1, behind 8192 tokens | ", "Bars met: "} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("the output does not say %q:\n%s", want, out.String())
			}
		}
		ours, faster := nameLean16, 1.0
		if b.mixed {
			ours, faster = nameMixed, 2
		}
		for _, c := range cases {
			if f := b.Report.Find(c.String(), ours, measure.StepMillis); f == nil || !measuretest.Near(f.Value, 2/faster) {
				t.Errorf("%v: %+v", c, f)
			}
			if f := b.Report.Find(c.String(), ours, measure.OverCompiled); (f != nil) != c.peers || f != nil && !measuretest.Near(f.Value, 2*faster) {
				t.Errorf("%v: %+v", c, f)
			}
			for _, m := range []measure.Metric{measure.OverFixed, measure.OverDefault} {
				if f := b.Report.Find(c.String(), ours, m); f == nil || !measuretest.Near(f.Value, 1.5) {
					t.Errorf("%v: %s: %+v", c, m, f)
				}
			}
			// The driver says that 1.5 ms are between any two events.
			launch := 1.5 / float64(b.ceiling.Launches())
			if f := b.Report.Find(c.String(), "read ceiling", measure.StepMillis); (f != nil) != (capability == 90) ||
				f != nil && !measuretest.Near(f.Value, launch*c.bytes()/float64(b.ceiling.Bytes())) {
				t.Errorf("%v: ceiling %+v", c, f)
			}
		}
		for _, c := range prompts[2:] { // a microsecond a token, half of it in mixed precision, and transformers' 4 ms
			ms := float64(c.batch*c.width) / 1e3
			for name, part := range map[string]float64{nameLean16: 1, nameMixed: 0.5} {
				for m, want := range map[measure.Metric]float64{measure.PromptMillis: part * ms, measure.FirstPrompt: part * ms, measure.Prompt: 1e6 / part, measure.OverHF: 4 / (part * ms)} {
					if f := b.Report.Find(c.String(), name, m); f == nil || !measuretest.Near(f.Value, want) {
						t.Errorf("%v, %s, %s: %+v, want %v", c, name, m, f, want)
					}
				}
			}
		}
		differs := strings.Contains(strings.Join(b.Report.Notes, "; "), "compiled and eager, differ from the start")
		if differs != (how == "opt-differs") {
			t.Errorf("%s: notes %q", how, b.Report.Notes)
		}
		for _, want := range []string{"max_position_embeddings\":16392,", "read compiled 1 1024 8\n", "read eager 1 1024 8\n", "prompt 16 512\n"} {
			if !strings.Contains(asked.Stderr.Text(), want) {
				t.Errorf("the worker was not asked for %q:%s", want, asked.Stderr.Text())
			}
		}
	}
}
