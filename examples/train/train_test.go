package main

import (
	"bytes"
	"encoding/xml"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/internal/reftest"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	reftest.PoisonOutputs()
	goleak.VerifyTestMain(m)
}

// short makes the command quick.
func short(t *testing.T) {
	t.Helper()
	wasTrained, wasContexts := trained, contexts
	t.Cleanup(func() { trained, contexts = wasTrained, wasContexts })
	trained, contexts = size{batch: 2, context: 16, heads: 2, dim: 16, hidden: 16}, []int{32, 128}
}

// TestGradTrain: both attentions learn, and learn the same; ours needs less memory,
// and not four times as much for four times the context.
func TestGradTrain(t *testing.T) {
	short(t)
	results := make([]result, 2)
	for i, a := range attentions {
		r := &results[i]
		r.attention = a
		if err := r.learn(&options{steps: 40, seed: 7}); err != nil {
			t.Fatal(err)
		}
		if err := r.measure(7); err != nil {
			t.Fatal(err)
		}
		first, last := r.losses[0], r.losses[39]
		if most := math.Log(float64(len(vocabulary))) + 1; !(first < most) || !(last < first-0.5) {
			t.Errorf("%s: the loss goes from %v to %v", a.name, first, last)
		}
	}
	for i, want := range results[0].losses {
		if got := results[1].losses[i]; !(math.Abs(got-want) < 1e-4) {
			t.Errorf("step %d: the loss is %v, with the default %v", i, got, want)
		}
	}
	stock, lean := results[0].memory, results[1].memory
	if lean[1] > stock[1] || lean[1] > 4.2*lean[0] {
		t.Errorf("contexts of %v take %v bytes, with the default %v", contexts, lean, stock)
	}
}

// TestSeed: one seed gives one course, another one another.
func TestSeed(t *testing.T) {
	short(t)
	var losses [3][]float64
	for i, seed := range []uint64{1, 1, 2} {
		r := result{attention: attentions[1]}
		if err := r.learn(&options{steps: 3, seed: seed}); err != nil {
			t.Fatal(err)
		}
		losses[i] = r.losses
	}
	for i := range losses[0] {
		if losses[0][i] != losses[1][i] || losses[0][i] == losses[2][i] {
			t.Errorf("step %d: losses %v", i, losses)
		}
	}
}

func TestCommand(t *testing.T) {
	short(t)
	svg := filepath.Join(t.TempDir(), "train.svg")
	for _, attn := range []string{"both", "lean", "default"} {
		var out, errs bytes.Buffer
		if code := run([]string{"-steps", "2", "-attn", attn, "-svg", svg}, &out, &errs); code != 0 {
			t.Fatalf("-attn %s: exit %d, %s", attn, code, &errs)
		}
		drawn, err := os.ReadFile(svg)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range attentions {
			want := attn == "both" || attn == a.name
			if got := strings.Contains(out.String(), a.name); got != want {
				t.Errorf("-attn %s: output has %s: %t\n%s", attn, a.name, got, &out)
			}
			if got := bytes.Contains(drawn, []byte(`class="line `+a.name)); got != want {
				t.Errorf("-attn %s: drawing has %s: %t", attn, a.name, got)
			}
		}
		if bytes.Contains(drawn, []byte("NaN")) || bytes.Contains(drawn, []byte("Inf")) {
			t.Errorf("-attn %s: the drawing has a number that is none", attn)
		}
		for d := xml.NewDecoder(bytes.NewReader(drawn)); ; {
			if _, err := d.Token(); err == io.EOF {
				break
			} else if err != nil {
				t.Fatalf("-attn %s: %v", attn, err)
			}
		}
	}
}

func TestWrongFlags(t *testing.T) {
	for _, args := range [][]string{
		{"-steps", "0"}, {"-steps", "x"}, {"-attn", "flash"}, {"-attn", ""}, {"-seed", "-1"}, {"text"}, {"-size", "1"},
	} {
		var out, errs bytes.Buffer
		if code := run(args, &out, &errs); code != 2 || errs.Len() == 0 || out.Len() > 0 {
			t.Errorf("%q: exit %d, output %q, error %q", args, code, &out, &errs)
		}
	}
	var out, errs bytes.Buffer
	if code := run([]string{"-h"}, &out, &errs); code != 0 || !strings.Contains(errs.String(), "-steps") {
		t.Errorf("-h: exit %d, %q", code, &errs)
	}
	short(t)
	errs.Reset()
	if code := run([]string{"-steps", "1", "-attn", "lean", "-svg", t.TempDir()}, &out, &errs); code != 1 || errs.Len() == 0 {
		t.Errorf("a folder for a file: exit %d, %q", code, &errs)
	}
}
