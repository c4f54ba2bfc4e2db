package report

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// threadsReport is what was measured with some numbers of threads.
func threadsReport(threads ...int) *measure.Report {
	r := &measure.Report{Command: "e2e -threads", Figures: []measure.Figure{}}
	for _, n := range threads {
		for i, who := range []string{"lean f32", "lean bf16", "transformers f32"} {
			row := r.Row(fmt.Sprintf("Steps of OPT-1.3b, %d threads", n), "b1, behind 401 tokens", who)
			row.Add(measure.Tokens, float64((i+1)*n), nil)
			row.Add(measure.Share, 0.5, nil)
			r.Row(fmt.Sprintf("Prompts of OPT-1.3b, %d threads", n), "1 x 401 tokens", who).Add(measure.Prompt, 100*float64(n), nil)
		}
		r.Row(fmt.Sprintf("Steps of OPT-1.3b, %d threads", n), "b1, behind 401 tokens", measure.ReadCeiling).Add(measure.Speed, 7, nil)
	}
	return r
}

// TestThreads: a picture of each case, with a line of each contender, from the JSON.
func TestThreads(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "cores.json")
	if err := threadsReport(1, 2, 8).Save(name); err != nil {
		t.Fatal(err)
	}
	draw := func(args ...string) (string, error) {
		flags, out := flag.NewFlagSet("", flag.ContinueOnError), new(bytes.Buffer)
		run := drawThreads(flags)
		if err := flags.Parse(args); err != nil {
			t.Fatal(err)
		}
		err := run(out, io.Discard)
		return out.String(), err
	}
	out, err := draw("-from", name, "-to", dir)
	if err != nil {
		t.Fatal(err)
	}
	for file, unit := range map[string]string{"steps-of-opt-1.3b-b1-behind-401-tokens.svg": "tokens/s", "prompts-of-opt-1.3b-1-x-401-tokens.svg": "prompt tokens/s"} {
		svg, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil || !strings.Contains(out, file) {
			t.Fatalf("%s: %v; written are %s", file, err, out)
		}
		for _, want := range []string{"threads", unit, "lean f32", "lean bf16", "transformers f32", "as many times that of the first", ">8<"} {
			if !bytes.Contains(svg, []byte(want)) {
				t.Errorf("%s does not have %q", file, want)
			}
		}
		if bytes.Contains(svg, []byte(measure.ReadCeiling)) {
			t.Errorf("%s has what has no such figure", file)
		}
		if n := bytes.Count(svg, []byte("stroke-dasharray")); n < 2 {
			t.Errorf("%s: %d dashed lines", file, n)
		}
	}
	if out, err := draw("-from", name, "-to", dir, "-only", "Steps.*b1"); err != nil || strings.Count(out, "\n") != 1 {
		t.Errorf("only steps: %s, %v", out, err)
	}
	for _, args := range [][]string{{"-from", name}, {"-to", dir}, {"-from", name, "-to", dir, "-only", "("}, {"-from", name, "-to", dir, "-only", "b3"}, {"-from", filepath.Join(dir, "none"), "-to", dir}} {
		if _, err := draw(args...); err == nil {
			t.Errorf("%v: no error", args)
		}
	}
	if _, err := threadPictures(threadsReport(4), regexp.MustCompile("")); err == nil {
		t.Error("one number of threads was drawn")
	}
}

// The line of as many times the speed begins at the fewest threads, wherever they stand.
func TestThreadsEven(t *testing.T) {
	all := newTables()
	for _, f := range []measure.Figure{{Case: "8", Value: 30}, {Case: "2", Value: 10}} {
		f.Table, f.Contender, f.Metric = "x", "lean", measure.Tokens
		all.figures["x"] = append(all.figures["x"], f)
	}
	q := question{title: "x", picture: picture{series: []column{{who: "lean", metric: measure.Tokens}}}}
	if err := all.addEven(&q); err != nil {
		t.Fatal(err)
	}
	if f := all.figures["x"][2:]; len(f) != 2 || f[0].Value != 40 || f[1].Value != 10 || f[0].Contender != q.picture.series[1].who {
		t.Errorf("%+v", f)
	}
}
