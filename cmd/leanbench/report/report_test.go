package report

import (
	"bytes"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

func committed(t *testing.T) []string {
	t.Helper()
	names, err := filepath.Glob("../../../docs/benchmarks/*.json")
	if err != nil || len(names) == 0 {
		t.Fatalf("no reports (%v)", err)
	}
	return names
}

// TestCommitted: the page and the pictures are what the JSON gives, and no picture is
// left over.
func TestCommitted(t *testing.T) {
	files, err := Files(committed(t))
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is not what the JSON gives (%v): go -C cmd/leanbench run . report $PWD/docs/benchmarks/*.json", name, err)
		}
	}
	pictures, _ := filepath.Glob("../../../docs/benchmarks/*.svg")
	for _, name := range pictures {
		if files[name] == nil {
			t.Errorf("%s is no question's picture", name)
		}
	}
}

// TestPictures: each is SVG, and names its axes.
func TestPictures(t *testing.T) {
	all, err := load(committed(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range questions {
		svg, err := all.draw(q)
		if err != nil {
			t.Errorf("%s: %v", q.id, err)
			continue
		}
		var texts strings.Builder
		in := xml.NewDecoder(bytes.NewReader(svg))
		for {
			token, err := in.Token()
			if errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Errorf("%s: %v", q.id, err)
				break
			}
			if text, ok := token.(xml.CharData); ok {
				texts.Write(text)
				texts.WriteByte('\n')
			}
		}
		for _, want := range []string{q.title, q.picture.x, q.picture.y} {
			if want == "" || !strings.Contains(texts.String(), want+"\n") {
				t.Errorf("%s: the picture does not say %q", q.id, want)
			}
		}
	}
}

// copyReports puts all that is committed into a folder, and changes one figure.
func copyReports(t *testing.T, change func(name string, r *measure.Report)) (names []string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "figures")
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	for _, name := range committed(t) {
		r, err := measure.Load(name)
		if err != nil {
			t.Fatal(err)
		}
		base := filepath.Base(name)
		change(base, r)
		data, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, filepath.Join(dir, base))
		if err := os.WriteFile(names[len(names)-1], data, 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return names
}

// TestCommand: report writes the page beside the folder of the JSON, and -check says
// when a figure has changed since.
func TestCommand(t *testing.T) {
	change := func(string, *measure.Report) {}
	names := copyReports(t, change)
	run := func(args ...string) (int, string) {
		var out, errs bytes.Buffer
		status := command.Run(Commands, append([]string{"report"}, append(args, names...)...), &out, &errs)
		return status, errs.String()
	}
	if status, _ := run("-check"); status != 1 {
		t.Error("-check is content with files that are not there")
	}
	if status, errs := run(); status != 0 {
		t.Fatal(errs)
	}
	if status, errs := run("-check"); status != 0 {
		t.Error(errs)
	}
	page := filepath.Dir(names[0]) + ".md"
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"**Missed: ", "| f32, 32 heads x 8192 x 128 | 19.1 | 98% | **87%** | 5.61 | 4.85 |\n", "](figures/cpu-memory.svg)", "- cpu: `leanbench cpu` (t): 2026-11-21; 7a349a9; ",
	} {
		if !strings.Contains(string(text), want) {
			t.Errorf("the page does not say %q", want)
		}
	}
	if missed, first := strings.Index(string(text), "**Missed"), strings.Index(string(text), "\n## "); missed < 0 || missed > first {
		t.Error("what misses its bar is not said first")
	}
	text = bytes.Replace(text, []byte("19.1"), []byte("19.2"), 1)
	if err := os.WriteFile(page, text, 0o666); err != nil {
		t.Fatal(err)
	}
	if status, errs := run("-check"); status != 1 || !strings.Contains(errs, page) {
		t.Errorf("status %d: %s", status, errs)
	}
	names = nil
	if status, errs := run(); status != 1 || !strings.Contains(errs, "name the JSON") {
		t.Errorf("status %d: %s", status, errs)
	}
}

// TestReadme: the README's table is put between its marks, and says what the JSON does.
func TestReadme(t *testing.T) {
	names := copyReports(t, func(name string, r *measure.Report) {
		for i, f := range r.Figures {
			if f.Table == "Of the memory's speed" && strings.HasPrefix(f.Case, "a query head") && f.Metric == "of the read ceiling, least" {
				r.Figures[i].Value = 0.985
			}
		}
	})
	// Reports lie in docs/figures, and the README beside docs.
	top := t.TempDir()
	folder := filepath.Join(top, "docs", "figures")
	if err := os.MkdirAll(folder, 0o777); err != nil {
		t.Fatal(err)
	}
	for i, name := range names {
		names[i] = filepath.Join(folder, filepath.Base(name))
		if err := os.Rename(name, names[i]); err != nil {
			t.Fatal(err)
		}
	}
	readme := filepath.Join(top, "README.md")
	for text, want := range map[string]string{
		"# A\n" + begin + "old\n" + end + "## B\n": "", "# A\n": "no lines", begin: "no lines", end + begin: "no lines",
	} {
		if err := os.WriteFile(readme, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		files, err := Files(names)
		if want != "" {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q: error %v, want %q", text, err, want)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		got := string(files[readme])
		if !strings.HasPrefix(got, "# A\n"+begin+"| what |") || !strings.HasSuffix(got, end+"## B\n") || strings.Contains(got, "old") {
			t.Errorf("README:\n%s", got)
		}
		for _, line := range []string{
			"| attention on a GPU, a query head a KV head, 300 MB and more | the memory's speed | 98.5% to 99.9% | NVIDIA H200 |\n",
			"| attention on a GPU, geometric mean of 523 shapes | the better of cuDNN and FlashDecoding | 1.10 | NVIDIA H200 |\n",
			"| a decode step of OPT-125m, 1.3b, 6.7b on a GPU | transformers, compiled | 2.9, 2.2, 1.5 | NVIDIA H200 |\n",
		} {
			if !strings.Contains(got, line) {
				t.Errorf("the README does not say %q:\n%s", line, got)
			}
		}
	}
}

// TestWrongReports: figures that do not fit are refused.
func TestWrongReports(t *testing.T) {
	for want, change := range map[string]func(r *measure.Report){
		"no figures of": func(r *measure.Report) { r.Figures = r.Figures[:0] },
		"no question shows the table \"Other\"": func(r *measure.Report) {
			r.Figures = append(r.Figures, measure.Figure{Table: "Other"})
		},
		"is there twice":       func(r *measure.Report) { r.Figures = append(r.Figures, r.Figures[0]) },
		"is in another report": func(r *measure.Report) { r.Figures[0].Table = "BenchmarkDecode" },
		"does not fit its bar": func(r *measure.Report) {
			least := 1.0
			r.Figures[0].Value, r.Figures[0].Bar = 0.5, &measure.Bar{Least: &least, Met: true}
		},
		"may have": func(r *measure.Report) { r.Notes = append(r.Notes, "PyTorch "+strings.Repeat("a", pageLimit)) },
	} {
		names := copyReports(t, func(name string, r *measure.Report) {
			if name == "peers.json" {
				change(r)
			}
		})
		if _, err := Files(names); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	if _, err := Files([]string{filepath.Join(t.TempDir(), "none.json")}); err == nil {
		t.Error("a file that is not there was read")
	}
}

func TestFormat(t *testing.T) {
	for _, c := range []struct {
		form   string
		metric measure.Metric
		v      float64
		want   string
	}{
		{"%", "", 0.9696, "97.0%"}, {"f0", "", 1499.6, "1500"}, {"f3", "", 1.0004, "1.000"}, {"us", "ns/op", 228234, "228"},
		{"us", "ns/op", 6458, "6.46"}, {"3", "", 1866, "1866"}, {"3", "", 0, "0"}, {"", measure.Share, 0.87, "87%"}, {"", "s", 0.315, "0.32"},
	} {
		if got := format(c.form, measure.Figure{Metric: c.metric, Value: c.v}); got != c.want {
			t.Errorf("%q of %v: %s, want %s", c.form, c.v, got, c.want)
		}
	}
	if got := anchor("A query's way: 16, or 64?"); got != "a-querys-way-16-or-64" {
		t.Error(got)
	}
}

// TestBench: what go test -bench prints becomes figures.
func TestBench(t *testing.T) {
	const printed = `goos: linux
cpu: Z80
BenchmarkStep/125m/lean/x-2   	       7	  15949940 ns/op	33793.28 MB/s	         8.645 %attention	    2354 allocs/op
BenchmarkStep/125m/default/x-2 	       2	  65110122 ns/op
PASS
`
	dir := t.TempDir()
	from, to := filepath.Join(dir, "b.txt"), filepath.Join(dir, "b.json")
	if err := os.WriteFile(from, []byte(printed), 0o666); err != nil {
		t.Fatal(err)
	}
	run := func(args ...string) (int, string) {
		var out, errs bytes.Buffer
		status := command.Run(Commands, append([]string{"gobench"}, args...), &out, &errs)
		return status, errs.String()
	}
	if status, errs := run("-from", from, "-json", to, "-command", "go test -bench Step", "-contender", "2"); status != 0 {
		t.Fatal(errs)
	}
	r, err := measure.Load(to)
	if err != nil {
		t.Fatal(err)
	}
	if r.Command != "go test -bench Step" || r.Machine.CPU != "Z80" || r.Machine.Workers != 2 || len(r.Figures) != 5 || r.Date == "" {
		t.Errorf("%+v", r)
	}
	want := measure.Figure{Table: "BenchmarkStep", Case: "125m/x", Contender: "lean", Metric: "%attention", Value: 8.645}
	if f := r.Figures[2]; f != want {
		t.Errorf("%+v, want %+v", f, want)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "are needed"},
		{[]string{"-from", from, "-json", to, "-command", "x", "-contender", "4"}, "no part 4"},
		{[]string{"-from", to, "-json", to, "-command", "x"}, "no benchmark"},
		{[]string{"-from", dir + "/none", "-json", to, "-command", "x"}, "none"},
	} {
		if status, errs := run(c.args...); status != 1 || !strings.Contains(errs, c.want) {
			t.Errorf("%q: status %d, %s", c.args, status, errs)
		}
	}
	if _, err := parseBench(strings.NewReader("BenchmarkX/a-2 1 fast ns/op\n"), 1); err == nil {
		t.Error("a number that is none was taken")
	}
}

// TestConsistent: a rounded value may be on the other side of its limit, not far from it.
func TestConsistent(t *testing.T) {
	least := 0.97
	for v, want := range map[float64][2]bool{0.98: {true, false}, 0.96: {false, true}, 0.97: {true, true}, 0.9696: {true, true}, math.Inf(1): {true, false}} {
		for i, met := range []bool{true, false} {
			if got := consistent(measure.Figure{Value: v, Bar: &measure.Bar{Least: &least, Met: met}}); got != want[i] {
				t.Errorf("%v, met %t: %t", v, met, got)
			}
		}
	}
}
