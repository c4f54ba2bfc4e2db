package e2e

import (
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	la "gorgonia.org/leanattention"
	lean "gorgonia.org/leanattention/decoder"

	"gorgonia.org/leanattention/cmd/leanbench/gpu"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
	"gorgonia.org/leanattention/cmd/leanbench/measure/measuretest"
)

// smallLlama is of a shape that is made and run in no time.
func smallLlama(tied bool) shape {
	s := newLlama("tiny", llamaSizes{layers: 2, hidden: 64, inner: 96, headDim: 16, tied: tied}, map[string]any{"rope_type": "default", "rope_theta": 1e4})
	s.fields["vocab_size"], s.fields["num_attention_heads"], s.fields["num_key_value_heads"] = 300, 4, 2
	return s
}

// TestLlamaShapes: the sizes that the models are called by, and what a step of them reads.
func TestLlamaShapes(t *testing.T) {
	for name, want := range map[string]struct{ all, read, token float64 }{
		"llama-3.2-1b": {1.236e9, 1.236e9, 2 * 16 * 8 * 64},
		"llama-3-8b":   {8.030e9, 7.505e9, 2 * 32 * 8 * 128}, // without the table of tokens
		"phi-3-medium": {13.960e9, 13.796e9, 2 * 40 * 10 * 128},
	} {
		s, err := shapeNamed(name, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		network, err := s.network()
		if err != nil {
			t.Fatal(err)
		}
		n := 0.0
		for w := range network.Weights() {
			if w.From.Name == "" {
				n += float64(elements(w.Shape))
			}
		}
		if math.Abs(n/want.all-1) > 1e-3 {
			t.Errorf("%v has %v weights, want %v", s, n, want.all)
		}
		weights, token := s.bytes(measure.StoreF16)
		if n := float64(weights) / 2; math.Abs(n/want.read-1) > 1e-3 || float64(token) != 2*want.token {
			t.Errorf("a step of %v reads %v weights and %d bytes a token, want %v and %v", s, n, token, want.read, 2*want.token)
		}
		if strings.ToLower(s.String()) != name {
			t.Errorf("%s is called %v", name, s)
		}
	}
	all, err := gpuCasesOf(t, "-shapes=llama-3.2-1b,llama-3-8b")
	var got []string
	for _, c := range all {
		least := 0.0
		if c.share != nil {
			least = *c.share.Least
		}
		got = append(got, fmt.Sprintf("%v %v %v %v %d", c.table(), c, least, c.peers, len(c.others)))
		if c.compiled != nil {
			t.Errorf("%v, %v has to be %v times as fast", c.shape, c, *c.compiled.Least)
		}
	}
	want := []string{
		"A decode step of Llama-3.2-1B in float16 b1, behind 1024 tokens 0.8 true 0", "A decode step of Llama-3.2-1B in float16 b16, behind 1024 tokens 0 true 0",
		"A decode step of Llama-3-8B in float16 b1, behind 1024 tokens 0.92 true 0", "A decode step of Llama-3-8B in float16 b16, behind 1024 tokens 0.85 true 0",
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("cases\n%s\nwant\n%s\n%v", strings.Join(got, "\n"), strings.Join(want, "\n"), err)
	}
}

// TestLeanLlama: the decoder that is measured does its work, on the CPU here, and a turn does not depend on the one
// before.
func TestLeanLlama(t *testing.T) {
	for _, tied := range []bool{false, true} {
		e, err := newLean(smallLlama(tied), nil, 6)
		if err != nil {
			t.Fatal(err)
		}
		if err := e.check(); err != nil {
			t.Error(err)
		}
		texts := map[string]string{}
		for _, c := range [][3]int{{1, 12, 4}, {2, 12, 6}, {2, 12, 6}, {2, 12, 3}, {6, 12, 6}, {2, 7, 2}, {1, 12, 4}} {
			prompt, steady, ids, err := e.decode(c[0], c[1], c[2])
			if err != nil || prompt <= 0 || steady <= 0 || len(ids) != 1+c[2] {
				t.Fatalf("%v: %v, %v, %d tokens (%v)", c, prompt, steady, len(ids), err)
			}
			key, text := fmt.Sprint(c[1]), strings.Join(ids, " ")
			if before, ok := texts[key]; ok && !strings.HasPrefix(text, before) && !strings.HasPrefix(before, text) {
				t.Errorf("%v: tokens %s, and %s before", c, text, before)
			}
			texts[key] = text
		}
		if err := e.close(); err != nil {
			t.Error(err)
		}
	}
}

// toldDecoder says when it forgets and when it decodes.
type toldDecoder struct {
	fixedDecoder
	forgets, decodes func()
}

func (d toldDecoder) giveBack() error { d.forgets(); return nil }

func (d toldDecoder) decode(batch, context, steps int) (prompt, steady time.Duration, ids []string, err error) {
	d.decodes()
	return d.fixedDecoder.decode(batch, context, steps)
}

// TestMeasureShape: what was measured is in the file before peers get ready for a case, which may be run alone, or be
// silent.
func TestMeasureShape(t *testing.T) {
	defer func(f func(shape, int) (decoder, error)) { openGPU = f }(openGPU)
	defer func(f func(string) (*measure.Worker, error)) { startDecoderWorker = f }(startDecoderWorker)
	for how, compiled := range map[string]bool{"opt-full": true, "opt-silent": false} {
		t.Run(how, func(t *testing.T) {
			starts, forgets := 0, 0
			startDecoderWorker = func(string) (*measure.Worker, error) {
				starts++
				return measure.Start(measuretest.Command(t, how))
			}
			cases, err := gpuCasesOf(t, "-shapes=llama-3.2-1b", "-steps=8")
			if err != nil || len(cases) != 2 {
				t.Fatalf("%v, %v", cases, err)
			}
			var said strings.Builder
			b := &e2eGPU{
				Bench:  gpu.NewBench(gpu.Options{Peers: true}, measure.Machine{}, io.Discard, &said),
				rounds: 3, json: filepath.Join(t.TempDir(), "e2e.json"), patience: map[bool]time.Duration{false: 50 * time.Millisecond}[compiled],
			}
			written := func(c stepCase, m measure.Metric) bool {
				r, err := measure.Load(b.json)
				return err == nil && r.Find(c.String(), nameLean16, m) != nil
			}
			openGPU = func(c shape, _ int) (decoder, error) {
				if c.fields["hidden_size"] != 2048 {
					t.Errorf("opened with %+v", c)
				}
				turns := 0
				return toldDecoder{
					fixedDecoder{fixed{0.1, 2e-3, []string{"1"}}, 0, new(bool)},
					func() {
						if forgets++; !written(cases[0], measure.StepMillis) {
							t.Error("ours is not written before peers are ready")
						}
					},
					func() {
						turns++
						if second := turns > b.rounds+1; second && compiled && !written(cases[0], measure.OverCompiled) {
							t.Error("a case is not written before the next")
						}
					},
				}, nil
			}
			if err := b.measureShape(cases, nil); err != nil {
				t.Fatal(err)
			}
			for _, c := range cases {
				if f := b.Report.Find(c.String(), nameLean16, measure.StepMillis); f == nil || f.Table != "A decode step of Llama-3.2-1B in float16" || !measuretest.Near(f.Value, 2) {
					t.Errorf("%v: %+v", c, f)
				}
				if f := b.Report.Find(c.String(), nameLean16, measure.OverCompiled); (f != nil) != compiled || f != nil && !measuretest.Near(f.Value, 2) {
					t.Errorf("%v: %+v", c, f)
				}
				n := 0
				for _, f := range b.Report.Figures {
					if f.Case == c.String() && f.Contender == nameLean16 && f.Metric == measure.StepMillis {
						n++
					}
				}
				if n != 1 {
					t.Errorf("%v: measured %d times", c, n)
				}
			}
			notes := strings.Join(b.Report.Notes, "; ")
			if want := map[bool]string{true: "not in turn", false: "silent for 50ms"}[compiled]; strings.Count(notes, want) != 1 {
				t.Errorf("notes %q", notes)
			}
			if forgets != map[bool]int{true: 1}[compiled] || (b.worker != nil) != compiled || starts != 1 {
				t.Errorf("%d times forgotten, %d workers, one is there: %v", forgets, starts, b.worker != nil)
			}
			if !strings.Contains(said.String(), "b16, behind 1024 tokens: lean 2.000 ms") {
				t.Errorf("said %s", said.String())
			}
			if w := b.worker; w != nil {
				if err := w.Close(); err != nil {
					t.Error(err)
				}
				if text := w.Stderr.Text(); !strings.Contains(text, "model float16 {") || !strings.Contains(text, `"num_key_value_heads":8,`) || strings.Count(text, "forget") != 2 {
					t.Errorf("the worker was asked%s", text)
				}
			} else if err := b.measureShape(cases[:1], nil); err != nil || starts != 2 { // another shape has another one
				t.Errorf("%v, %d workers", err, starts)
			}
			if b.worker != nil && !compiled {
				t.Error("a silent worker is kept")
			}
		})
	}
}

// TestLlamaWhole: a decoder that attends by another schedule, and one that reads prompts again and again, have the same weights
// and say the same.
func TestLlamaWhole(t *testing.T) {
	e, err := newLean(smallLlama(false), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var texts [2]string
	fixed := e.fixedSplit()
	for i, d := range []engine{e, fixed} {
		_, _, ids, err := d.decode(2, 12, 4)
		if err != nil {
			t.Fatal(err)
		}
		texts[i] = strings.Join(ids, " ")
	}
	if texts[0] != texts[1] {
		t.Errorf("tokens %s, and with fixed splits %s", texts[0], texts[1])
	}
	if other := fixed.(*leanEngine).options.Schedule; other != la.FixedSplit(8) {
		t.Errorf("schedule %v", other)
	}
	none := e.with(func(o *lean.Options) { o.Schedule = la.FixedSplit(-1) }) // which attention refuses: it is told
	if _, _, _, err := none.decode(1, 7, 1); !errors.Is(err, la.ErrOption) {
		t.Errorf("-1 splits: %v", err)
	}
	r := e.reading(true)
	for _, c := range [][2]int{{2, 12}, {2, 12}, {1, 7}} {
		if took, err := r.read(c[0], c[1]); err != nil || took <= 0 {
			t.Errorf("%v: %v, %v", c, took, err)
		}
		p := r.(leanPrompts)
		if p.options.Exact || p.engine.Stats().SharedTokens > 0 { // a prompt is never read in part
			t.Errorf("%v: %+v, %+v", c, p.options, p.engine.Stats())
		}
	}
	for _, d := range []interface{ close() error }{r, fixed, e} {
		if err := d.close(); err != nil {
			t.Error(err)
		}
	}
}
