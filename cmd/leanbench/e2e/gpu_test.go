package e2e

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"strings"
	"testing"
	"time"

	lean "gorgonia.org/leanattention/decoder"
	"gorgonia.org/leanattention/internal/cuda"
	"gorgonia.org/tensor"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

func gpuCasesOf(t *testing.T, args ...string) ([]stepCase, error) {
	t.Helper()
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	o := e2eGPUFlags(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return o.cases()
}

// TestStepCases: the cases and bars are those that were asked for.
func TestStepCases(t *testing.T) {
	all, err := gpuCasesOf(t)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range all {
		text := fmt.Sprintf("%v %v", c.shape, c)
		if c.compiled != nil {
			text += fmt.Sprintf(" x%v", *c.compiled.Least)
		}
		if c.share != nil {
			text += fmt.Sprintf(" %v", *c.share.Least)
		}
		if c.peers != (c.compiled != nil) || c.steps != 50 || c.shape.positions() < c.context+c.steps {
			t.Errorf("%s: %+v", text, c)
		}
		if strings.Join(c.others, " ") != map[bool]string{true: "fixed default"}[c.share != nil] {
			t.Errorf("%s beside %q", text, c.others)
		}
		got = append(got, text)
	}
	want := []string{
		"OPT-125m b1, behind 1024 tokens x2.5", "OPT-125m b16, behind 1024 tokens x2",
		"OPT-1.3b b1, behind 1024 tokens x2.2", "OPT-1.3b b16, behind 1024 tokens x1.6",
		"OPT-6.7b b1, behind 1024 tokens x1.6 0.88", "OPT-6.7b b16, behind 1024 tokens x1.35",
		"OPT-6.7b b1, behind 8192 tokens 0.88", "OPT-6.7b b1, behind 32768 tokens 0.88",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("cases\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if n := all[0].shape.positions(); n != 2048 {
		t.Errorf("%d positions", n)
	}
	if all, err := gpuCasesOf(t, "-shapes=1.3b", "-batches=4", "-contexts=512,4096", "-steps=8"); err != nil || len(all) != 2 ||
		all[1].String() != "b4, behind 4096 tokens" || all[1].compiled != nil || !all[1].peers || all[0].shape.positions() != 4104 {
		t.Errorf("%+v (%v)", all, err)
	}
	for _, c := range []struct{ arg, want string }{
		{"-shapes=7b", `"7b" is none of 1.3b, 125m,`},
		{"-batches=1,x", `-batches: "x"`},
		{"-contexts=0", `-contexts: "0"`},
		{"-long=-1", `-long: "-1"`},
		{"-steps=0", "-steps 0"},
		{"-attn=lean", `-attn: "lean"`},
	} {
		if _, err := gpuCasesOf(t, c.arg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.arg, err)
		}
	}
	if _, err := gpuCasesOf(t, "-contexts=", "-long="); err == nil {
		t.Error("no cases, and no error")
	}
}

func promptCasesOf(t *testing.T, args ...string) ([]promptCase, error) {
	t.Helper()
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	o := e2eGPUFlags(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return o.promptCases()
}

func TestPromptCases(t *testing.T) {
	all, err := promptCasesOf(t, "-shapes=1.3b,6.7b", "-prompts=1x8192,16x512")
	if err != nil || len(all) != 4 || all[0].bar != nil || all[3].bar == nil || all[3].shape.positions() != 8192 || all[3].String() != "16 x 512 tokens" {
		t.Errorf("%+v, %v", all, err)
	}
	for _, args := range [][]string{{"-prompts=16"}, {"-prompts=0x5"}, {"-prompts=4x"}, {"-prompts=4x5x6"}, {"-prompts=4x5", "-shapes=7b"}} {
		if all, err := promptCasesOf(t, args...); err == nil {
			t.Errorf("%v: %v", args, all)
		}
	}
	if all, err := promptCasesOf(t); err != nil || len(all) > 0 {
		t.Errorf("no prompts: %v, %v", all, err)
	}
}

func TestStepBytes(t *testing.T) {
	all, err := gpuCasesOf(t, "-shapes=6.7b", "-batches=16", "-long=")
	if err != nil || len(all) != 1 {
		t.Fatal(err)
	}
	const hidden, layers = 4096, 32
	matrices := float64(50272*hidden + layers*12*hidden*hidden)
	vectors := float64(layers*(4*hidden+5*hidden+4*hidden) + 2*hidden) // biases, and of layer norms
	keys := 16 * 1049.5 * 2 * layers * hidden                          // behind 1024 tokens and half of 50 steps
	if got, want := all[0].bytes(), 2*matrices+4*vectors+2*keys; got != want {
		t.Errorf("%v bytes a step, want %v", got, want)
	}
}

func TestE2EDevice(t *testing.T) {
	defer gpu.UseDriver(func() (*cuda.Driver, error) { return cuda.LoadFrom("/no/such/libcuda.so.1") }, nil)()
	for args, want := range map[string]string{
		"-device=gpu -patience=0s": "-patience 0s is not positive",
		"-device=gpu":              "no CUDA driver", "-device=tpu": `-device "tpu" is neither cpu nor gpu`, "-device=cpu": "-python is needed",
	} {
		var stdout, stderr strings.Builder
		if status := command.Run(Commands, append([]string{"e2e"}, strings.Fields(args)...), &stdout, &stderr); status != 1 || stdout.Len() > 0 || !strings.Contains(stderr.String(), want) {
			t.Errorf("%s: status %d, %q, %q", args, status, stdout.String(), stderr.String())
		}
	}
}

// TestRandomModel: weights are random, scaled, and the same when asked for again.
func TestRandomModel(t *testing.T) {
	n, err := smallShape().network()
	if err != nil {
		t.Fatal(err)
	}
	m := newRandomWeights(n)
	starts := make(map[uint64]string)
	for w := range n.Weights() {
		x, err := m.Tensor(w.Name, w.Shape...)
		if err != nil || !x.Shape().Eq(tensor.Shape(w.Shape)) {
			t.Fatalf("%s: %v", w.Name, err)
		}
		again, err := m.Tensor(w.Name, w.Shape...)
		if err != nil || fmt.Sprint(x.Data()) != fmt.Sprint(again.Data()) {
			t.Errorf("%s differs when asked for again (%v)", w.Name, err)
		}
		sum, squares, n := 0.0, 0.0, 0
		add := func(v float64) { sum, squares, n = sum+v, squares+v*v, n+1 }
		switch data := x.Data().(type) {
		case []float32:
			for _, v := range data {
				add(float64(v))
			}
		default:
			for _, v := range m.block[:1<<16] {
				add(float64(v.Float32()))
			}
		}
		want := 0.0
		if strings.HasSuffix(w.Name, "layer_norm.weight") {
			want = 1
		}
		mean := sum / float64(n)
		if spread := math.Sqrt(squares/float64(n) - mean*mean); math.Abs(mean-want) > 0.02 || spread < 0.01 || spread > 0.03 {
			t.Errorf("%s: mean %v, standard deviation %v", w.Name, mean, spread)
		}
		starts[uint64(x.Uintptr())] = w.Name
	}
	if len(starts) < 30 {
		t.Errorf("only %d places where weights begin", len(starts))
	}
}

// TestLean: the decoder that is measured does its work, on the CPU here, and a
// turn does not depend on the one before.
func TestLean(t *testing.T) {
	e, err := newLean(smallShape(), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := e.check(); err != nil {
		t.Error(err)
	}
	var first []string
	for range 2 {
		_, steady, ids, err := e.decode(2, 20, 6)
		if err != nil || steady <= 0 || len(ids) != 7 {
			t.Fatalf("%v, %d tokens (%v)", steady, len(ids), err)
		}
		if first == nil {
			first = ids
		} else if strings.Join(ids, " ") != strings.Join(first, " ") {
			t.Errorf("tokens %v, and %v before", ids, first)
		}
	}
	if err := e.close(); err != nil {
		t.Error(err)
	}
}

// TestIsLikely: a token that is not the most likely one, but for rounding, is an error.
func TestIsLikely(t *testing.T) {
	likely := []lean.Likely{{ID: 4, LogProb: -1}, {ID: 2, LogProb: -1.0001}, {ID: 7, LogProb: -2}}
	for id, want := range map[int]string{4: "", 2: "", 7: "token 7 was chosen", 5: "token 5 was chosen"} {
		if err := isLikely(likely, 100, id); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%d: %v, want %q", id, err, want)
		}
	}
	if err := isLikely([]lean.Likely{{ID: 1, LogProb: -math.Log(100)}}, 100, 1); err == nil {
		t.Error("all tokens are equally likely, and there is no error")
	}
}

// fixedDecoder is a decoder that takes a given time for a step, of which mixed precision takes half, and cannot decode
// behind so many tokens.
type fixedDecoder struct {
	fixed
	tooLong int
	mixed   *bool
}

func (d fixedDecoder) decode(batch, context, steps int) (prompt, steady time.Duration, ids []string, err error) {
	if context == d.tooLong {
		return 0, 0, nil, errors.New("too long")
	}
	return d.now().decode(batch, context, steps)
}

func (d fixedDecoder) now() fixed {
	if *d.mixed {
		d.step /= 2
	}
	return d.fixed
}

func (fixedDecoder) check() error    { return nil }
func (fixedDecoder) giveBack() error { return nil }

func (d fixedDecoder) fixedSplit() engine { return d.attending("fixed") }

func (d fixedDecoder) mix() { *d.mixed = true }

func (d fixedDecoder) reading(mixed bool) promptReader { return fixedPrompts(mixed) }

// fixedPrompts takes half as long in mixed precision.
type fixedPrompts bool

func (mixed fixedPrompts) read(batch, width int) (time.Duration, error) {
	t := time.Duration(batch*width) * time.Microsecond
	if mixed {
		t /= 2
	}
	return t, nil
}
func (fixedPrompts) close() error { return nil }

// attending takes half as long again.
func (d fixedDecoder) attending(string) engine {
	f := d.now()
	f.step *= 1.5
	return f
}

// TestJudgeSteps: times become figures, with bars.
func TestJudgeSteps(t *testing.T) {
	all, err := gpuCasesOf(t, "-shapes=6.7b", "-batches=1")
	if err != nil {
		t.Fatal(err)
	}
	b := &e2eGPU{Bench: &gpu.Bench{Report: &measure.Report{}}}
	c := all[0]
	var contenders []measure.Contender
	for _, name := range []string{"A", "B", nameLean16, nameCompiled, nameEager} {
		contenders = append(contenders, measure.Contender{Name: name})
	}
	b.judgeSteps(c, contenders, []measure.Samples{{3.2e-3, 3.2e-3}, {3e-3, 3e-3}, {4e-3, 4e-3}, {6e-3, 6e-3}, {44e-3, 44e-3}}, 2)
	for _, w := range []struct {
		who  string
		m    measure.Metric
		want float64
		bar  string
	}{
		{"read ceiling", measure.StepMillis, 3, ""},
		{nameLean16, measure.StepMillis, 4, ""},
		{nameLean16, measure.StepBytes, c.bytes() / 1e9, ""},
		{nameLean16, measure.Speed, c.bytes() / 4e-3 / 1e9, ""},
		{nameLean16, measure.GPUShare, 0.75, ">= 88.0% and <= 115.0%: **missed**"},
		{nameLean16, measure.OverCompiled, 1.5, ">= 1.60: **missed**"},
		{nameLean16, measure.OverEager, 11, ""},
		{nameCompiled, measure.GPUShare, 0.5, ""},
	} {
		f := b.Report.Find(c.String(), w.who, w.m)
		if f == nil || !measuretest.Near(f.Value, w.want) || (f.Bar != nil) != (w.bar != "") || f.Bar != nil && f.Bar.Text(w.m) != w.bar {
			t.Errorf("%s of %s: %+v, want %v %s", w.m, w.who, f, w.want, w.bar)
		}
	}
	if f := b.Report.Find(c.String(), nameEager, measure.OverCompiled); f != nil {
		t.Errorf("%+v", f)
	}
	// Without peers and before compute capability 9.0 there are times alone.
	b.Report = &measure.Report{}
	b.judgeSteps(c, contenders[2:3], []measure.Samples{{4e-3}}, 0)
	if n := len(b.Report.Figures); n != 3 {
		t.Errorf("%d figures: %+v", n, b.Report.Figures)
	}
}

// TestOPTPeers: what a way can't do is noted, and the others are measured.
func TestOPTPeers(t *testing.T) {
	for how, want := range map[string]string{
		"opt":         "",
		"opt-skips":   "OPT-tiny, b2, behind 8 tokens: transformers, compiled: 3 CUDA graphs were skipped",
		"opt-refuses": `OPT-tiny, b2, behind 8 tokens: without transformers, compiled: "read compiled 2 8 4": the worker says "error no memory"`,
		"opt-full":    "OPT-tiny, b2, behind 8 tokens: transformers, compiled not in turn with ours, behind them: both are more than the GPU's memory",
		"opt-silent":  `OPT-tiny, b2, behind 8 tokens: without transformers, compiled: "read compiled 2 8 4": the worker is silent for 50ms`,
	} {
		w, err := measure.Start(measuretest.Command(t, how))
		if err != nil {
			t.Fatal(err)
		}
		w.Patience = map[bool]time.Duration{true: 50 * time.Millisecond}[how == "opt-silent"]
		b := &e2eGPU{Bench: &gpu.Bench{Report: &measure.Report{}, Stderr: io.Discard}, worker: w}
		c := stepCase{shape: smallShape(), batch: 2, context: 8, steps: 4, peers: true}
		ready, alone, err := b.prepare(c, fixedDecoder{})
		if err != nil || alone != (how == "opt-full") || (b.worker == nil) != (how == "opt-silent") {
			t.Errorf("%s: alone %v, worker %v: %v", how, alone, b.worker, err)
		}
		compiled, eager := how != "opt-refuses" && b.worker != nil, b.worker != nil
		if names := fmt.Sprint(ready); strings.Contains(names, nameCompiled) != compiled || strings.Contains(names, nameEager) != eager {
			t.Errorf("%s: ready are %s", how, names)
		}
		if notes := strings.Join(b.Report.Notes, "; "); notes != want {
			t.Errorf("%s: notes %q, want %q", how, notes, want)
		}
		c.peers = false
		if ready, _, err := b.prepare(c, fixedDecoder{}); len(ready) != 0 || err != nil {
			t.Errorf("%d peers where none were wanted: %v", len(ready), err)
		}
		if err := w.Close(); (err != nil) != (b.worker == nil) {
			t.Errorf("%s: %v", how, err)
		}
	}
}

// TestClocked: each line says when it was written.
func TestClocked(t *testing.T) {
	var out strings.Builder
	c := &clocked{&out, time.Now().Add(-83 * time.Second)}
	if n, err := fmt.Fprintf(c, "ready\n"); n != 6 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	var at int
	if n, err := fmt.Sscanf(out.String(), "%d s: ready\n", &at); n != 1 || err != nil || at < 83 {
		t.Errorf("%q", out.String())
	}
}
