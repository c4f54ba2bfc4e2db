package gpu

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"gorgonia.org/leanattention/cmd/leanbench/command"
	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// measuredShape takes down what a run of leanbench gpu would of an even shape.
func measuredShape(r *measure.Report, c gpuCase, us, share, flash, best, dense16, dense64 float64) {
	is := c.shape.String()
	r.Row(c.table, is, "read ceiling, 3 x 32 KB").Add(measure.Micros, us*share, nil)
	lean := r.Row(c.table, is, ours)
	lean.Add(measure.Micros, us, c.micros)
	lean.Add(measure.GPUShare, share, c.share)
	lean.Add(measure.OverFlash, flash, c.flash)
	lean.Add(measure.OverBest, best, measure.AtLeast(1))
	for n, v := range map[int]float64{16: dense16, 64: dense64} {
		r.Row(c.table, is, pageName(n)).Add(measure.OfDense, v, c.paged)
		r.Row(c.table, is, readerName(n)).Add(measure.GPUShare, 0.975, nil)
	}
}

func saved(t *testing.T, name string, r *measure.Report) string {
	t.Helper()
	name = filepath.Join(t.TempDir(), name)
	if err := r.Save(name); err != nil {
		t.Fatal(err)
	}
	return name
}

func TestGPUTables(t *testing.T) {
	var one, two measure.Report
	measuredShape(&one, namedCases()[3], 5, 0.77, 2, 1.44, 0.97, 0.9699)
	for _, c := range groupCases()[:1] {
		is := c.shape.String()
		r := one.Row(c.table, is, ours)
		r.Add(measure.Micros, 60, nil)
		r.Add(measure.GPUShare, 0.97, nil)
		for i, n := range c.groups {
			r := one.Row(c.table, is, groupName(n))
			r.Add(measure.Micros, 60+float64(i)/2, nil)
			r.Add(measure.GPUShare, 0.96, nil)
			r.Add(measure.TimeOfMHA, 1+float64(i)/120, c.grouped)
		}
	}
	c := raggedCases()[0]
	one.Row(c.table, c.shape.String(), "read ceiling, 6 x 16 KB").Add(measure.Micros, 500, nil)
	for i, n := range c.pages {
		r := one.Row(c.table, c.shape.String(), pageName(n))
		r.Add(measure.Micros, 531-float64(i), nil)
		r.Add(measure.GPUShare, 0.942, nil)
		r.Add(measure.OfAllowed, 1.002-0.0025*float64(i), c.ragged)
	}
	one.Row("All shapes with peers, geometric mean", "", ours).Add(measure.OverBest, 1.4, nil)
	two.Row("All shapes with peers, geometric mean", "", ours).Add(measure.OverBest, 1.0, nil)
	measuredShape(&two, evenCase(tableSweep, EvenShape(4, 8, 8, 1024, 64)), 5, 0.75, 2, 1.21, 1.01, 0.98)
	measuredShape(&two, evenCase(tableSweep, EvenShape(64, 64, 8, 65536, 128)), 3730, 0.975, 1.5, 1, 0.96, 0.99)
	measuredShape(&two, evenCase(tableSweep, EvenShape(64, 32, 32, 16384, 128)), 3729, 0.979, 1.5, 0.999, 0.96, 0.99)
	first, second := saved(t, "1.json", &one), saved(t, "2.json", &two)

	var out, errs bytes.Buffer
	if status := command.Run(Commands, []string{"gputables", "-from", first, "-from", second}, &out, &errs); status != 0 || errs.Len() > 0 {
		t.Fatalf("status %d: %s", status, errs.String())
	}
	for _, want := range []string{
		"over 4 shapes: 1.149 times as fast as the best of them in the geometric mean (bar 1.10: met), at least 0.999 (bar 1.00: **missed**); 1.73 times as fast as FLASH_ATTENTION, at least 1.500.",
		"| shapes | 2 |  |  |  |  | 2 |\n| x the best, geometric mean | 1.320 |  |  |  |  | 0.999 |\n| least | 1.210 |  |  |  |  | 0.999 |\n",
		"1 shapes of MHA of 300 MB and more: 97.9% to 97.9% of the ceiling, median 97.9% (bar 98%: **missed**, 0 of 1).\n1 shapes with groups of query heads of 300 MB and more: 97.5% to 97.5% of the ceiling, median 97.5%.\n",
		"| heads of 64, below 6 | 2 | 2 | 99.0% | 97.0% | 97.5% |\n| heads of 64, all | 2 | 2 | 99.0% | 97.0% | 97.5% |\n| heads of 128, 70 and more | 2 | 0 | 96.0% | 96.0% | 97.5% |\n",
		"| heads of 64, below 6 | 2 | 1 | 97.5% | 97.0% | 97.5% |\n",
		"| b1, 32 heads x 1024 x 64 | 5.00 | 77.0% | 2.00 | 1.44 | 97.0% | 97.0% | 7 us: met |\n",
		"| A: 131072 and 31 x 1024, 32 heads of 128 | 500.0 | 531.0 | 94.2% | 100.2%: **missed** | 530.0 | 94.2% | 100.0%: met |\n",
		"| b4, 8 heads x 16384 x 128, us | 60.0 | 60.0 | 60.5 | 61.0 | 61.5 | 62.0 | 62.5 |\n| of the read ceiling | 97.0% | 96.0% | 96.0% | 96.0% | 96.0% | 96.0% | 96.0% |\n| time of one head's | | 100.0%: met | 100.8%: met | 101.7%: met | 102.5%: met | 103.3%: **missed** | 104.2%: **missed** |\n",
		"Heads of 64:\n\n| batch, heads | 1024 | 4096 | 16384 | 65536 | 262144 |\n|---|---|---|---|---|---|\n| b1, 32 | 5.00, 77%, 1.44 |  |  |  |  |\n| b4, 8 | 5.00, 75%, 1.21 |  |  |  |  |\n",
		"Heads of 128:\n\n| batch, heads | 1024 | 4096 | 16384 | 65536 | 262144 |\n|---|---|---|---|---|---|\n| b64, 32 |  |  | 3730, 98%, 1.00 |  |  |\n| b64, 64/8 |  |  |  | 3730, 98%, 1.00 |  |\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q", want)
		}
	}
	if t.Failed() {
		t.Log(out.String())
	}

	// The same as JSON.
	to := filepath.Join(t.TempDir(), "gpu.json")
	if status := command.Run(Commands, []string{"gputables", "-from", first, "-from", second, "-json", to}, &out, &errs); status != 0 || errs.Len() > 0 {
		t.Fatalf("status %d: %s", status, errs.String())
	}
	r, err := measure.Load(to)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		table, is, who string
		metric         measure.Metric
		want           float64
		bar            string // met, missed, or none
	}{
		{tableByTime, "all", ours, "x best peer, geometric mean", 1.149, "met"},
		{tableByTime, "all", ours, "x best peer, least", 0.999, "missed"},
		{tableByTime, "all", ours, "x FLASH, least", 1.5, ""},
		{tableByTime, "below 7 us", ours, "shapes", 2, ""},
		{tableByTime, "300 us and more", ours, "x best peer, least", 0.999, ""},
		{tableMemory, "a query head a KV head, 300 MB and more", ours, "of the read ceiling, least", 0.979, "missed"},
		{tableMemory, "a query head a KV head, 300 MB and more", ours, "reach the bar", 0, ""},
		{tableMemory, "groups of query heads, 300 MB and more", ours, "of the read ceiling, median", 0.975, ""},
		{tablePages, "heads of 64, below 6", "pages of 16", "of contiguous, median", 0.99, ""},
		{tablePages, "heads of 64, below 6", "pages of 64", "of contiguous, least", 0.9699, "missed"},
		{tablePages, "heads of 64, below 6", "pages of 16", "of contiguous, least", 0.97, "met"},
		{tablePages, "heads of 128, all", "pages of 16", "reach 97%", 0, ""},
		{tableNamed, "b1, 32 heads x 1024 x 64", ours, measure.Micros, 5, "met"},
		{tableRagged, "A: 131072 and 31 x 1024, 32 heads of 128", pageName(16), measure.OfAllowed, 1.002, "missed"},
		{tableGroups, "b4, 8 heads x 16384 x 128", groupName(16), measure.TimeOfMHA, 1 + 5.0/120, "missed"},
		{tableSweep, "b64, 64/8 heads x 65536 x 128", ours, measure.GPUShare, 0.975, ""},
		{tableSweep, "b1, 32 heads x 1024 x 64", ours, measure.OverBest, 1.44, ""},
	} {
		var f *measure.Figure
		for i, g := range r.Figures {
			if g.Table == c.table && g.Case == c.is && g.Contender == c.who && g.Metric == c.metric {
				f = &r.Figures[i]
			}
		}
		verdict := ""
		if f != nil && f.Bar != nil {
			verdict = map[bool]string{true: "met", false: "missed"}[f.Bar.Met]
		}
		if f == nil || f.Value < c.want-0.0005 || f.Value > c.want+0.0005 || verdict != c.bar {
			t.Errorf("%s, %s, %s, %s: %+v, want %v, %q", c.table, c.is, c.who, c.metric, f, c.want, c.bar)
		}
	}

	broken := filepath.Join(t.TempDir(), "broken.json")
	if err := os.WriteFile(broken, []byte("{"), 0o666); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, "no -from"},
		{[]string{"-from", first, "-from", first}, "no parts of one measurement"},
		{[]string{"-from", filepath.Join(t.TempDir(), "none.json")}, "none.json"},
		{[]string{"-from", broken}, "broken.json"},
	} {
		out.Reset()
		errs.Reset()
		if status := command.Run(Commands, append([]string{"gputables"}, c.args...), &out, &errs); status != 1 || out.Len() > 0 || !strings.Contains(errs.String(), c.want) {
			t.Errorf("%q: status %d, %q, %q", c.args, status, out.String(), errs.String())
		}
	}
}

func TestDigits(t *testing.T) {
	for v, want := range map[float64]string{5.034: "5.03", 9.994: "9.99", 9.996: "10.0", 47.449: "47.4", 99.96: "100", 121.4: "121", 1866: "1870", 0.5: "0.500"} {
		if got := digits(v); got != want {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
}
