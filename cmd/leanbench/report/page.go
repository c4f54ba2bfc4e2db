package report

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// pageLimit is the maximum size of the page, in bytes.
const pageLimit = 30 << 10

const head = `# Benchmarks

<!-- written by leanbench report docs/benchmarks/*.json: change the JSON, or cmd/leanbench/report -->

Programs take turns in one run, and their outputs are compared first. A ratio is the median over neighbouring turns. A share is of the read ceiling: a kernel that only reads the same bytes (keys and values, and weights where a step reads them). Machines of one kind differ by more than half, so compare figures of one run only. A picture links to its run's JSON. ` + "`docs/benchmarks.sh`" + ` measures everything again; [lab/](lab/) has what was tried. NEON kernels have run on an emulator only.

`

// page returns the page. base is the folder of the pictures.
func (t *tables) page(base string) ([]byte, error) {
	var w bytes.Buffer
	w.WriteString(head)
	t.writeMissed(&w)
	for _, q := range questions {
		picture := fmt.Sprintf("%s/%s.svg", base, q.id)
		var runs []string // links to the JSON; the first link shows the picture
		for _, table := range q.tables {
			run := t.names[t.reports[table]]
			link := fmt.Sprintf("[![%s](%s)](%s/%s.json)", run, picture, base, run)
			if len(runs) > 0 {
				link = fmt.Sprintf("[%s](%s/%[1]s.json)", run, base)
			}
			if !slices.ContainsFunc(runs, func(l string) bool { return strings.HasSuffix(l, "/"+run+".json)") }) {
				runs = append(runs, link)
			}
		}
		fmt.Fprintf(&w, "\n## %s\n\n%s\n\n%s\n", q.title, q.text, strings.Join(runs, " "))
		t.writeTable(&w, q)
	}
	t.writeRuns(&w)
	if w.Len() > pageLimit {
		return nil, fmt.Errorf("the page has %d bytes, and may have %d", w.Len(), pageLimit)
	}
	return w.Bytes(), nil
}

// writeRuns lists the source of all figures.
func (t *tables) writeRuns(w *bytes.Buffer) {
	w.WriteString("\n## Runs\n\n")
	transcribed := ""
	for _, r := range t.order {
		fmt.Fprintf(w, "- %s: %s\n", t.names[r], source(r))
		if r.Transcribed != "" {
			transcribed = r.Transcribed
		}
	}
	if transcribed != "" {
		fmt.Fprintf(w, "\n(t) No JSON was kept of this run. Its figures were copied from %s.\n", transcribed)
	}
}

// source describes the source of a report's figures.
func source(r *measure.Report) string {
	command := r.Command
	if !strings.HasPrefix(command, "go ") && !strings.HasPrefix(command, "leanbench ") {
		command = "leanbench " + command
	}
	s := "`" + command + "`"
	if r.Transcribed != "" {
		s += " (t)"
	}
	var on []string
	if r.Date != "" {
		on = append(on, r.Date)
	}
	if r.Commit != "" {
		on = append(on, r.Commit[:min(7, len(r.Commit))])
	}
	machine := r.Machine
	if machine.GPU != "" {
		name, _, _ := strings.Cut(strings.TrimPrefix(machine.GPU, "NVIDIA "), " 80GB")
		machine = measure.Machine{GPU: name, Load: -1}
	}
	if m := machine.String(); m != "" {
		on = append(on, m)
	}
	for _, note := range r.Notes {
		if strings.Contains(note, "PyTorch") || strings.Contains(note, "CTranslate2") { // the clocks and other notes are in the JSON only
			note, _, _ = strings.Cut(note, "; ")
			on = append(on, note)
		}
	}
	return s + ": " + strings.Join(on, "; ") + "."
}

// writeMissed lists the number of missed bars of each question, with the figure that misses its bar by the
// largest factor.
func (t *tables) writeMissed(w *bytes.Buffer) {
	bars, missed := 0, 0
	var lines strings.Builder
	for _, q := range questions {
		n, furthest, by := 0, "", 0.0
		for _, table := range q.tables {
			for _, f := range t.figures[table] {
				if f.Bar == nil || q.only != nil && !q.only.MatchString(f.Case) {
					continue
				}
				if bars++; f.Bar.Met {
					continue
				}
				n++
				limit, far := q.limit(f)
				if far <= by {
					continue
				}
				who := strings.TrimPrefix(strings.TrimPrefix(f.Contender, "lean, ")+" ", "lean ")
				is := f.Case
				if q.name != nil {
					is = q.name.FindStringSubmatch(table)[1] + ", " + is
				}
				if q.split != nil {
					if row := q.split.FindStringSubmatch(is); row != nil && row[q.split.SubexpIndex("series")] == "" {
						is = row[q.split.SubexpIndex("row")] // the rest is the same for all cases
					}
				}
				furthest, by = fmt.Sprintf("%s, %s%s, for %s", is, who, format(q.form(f.Metric), f), limit), far
			}
		}
		if n == 1 {
			fmt.Fprintf(&lines, "- [%s](#%s): %s.\n", q.title, anchor(q.title), furthest)
		} else if n > 1 {
			fmt.Fprintf(&lines, "- [%s](#%s): %d, the furthest %s.\n", q.title, anchor(q.title), n, furthest)
		}
		missed += n
	}
	fmt.Fprintf(w, "**Missed: %d of %d bars** (bold in the tables).\n\n%s", missed, bars, lines.String())
}

// limit returns the bar of a missed figure in words, and the factor by which the figure misses the bar.
func (q question) limit(f measure.Figure) (text string, by float64) {
	say, v := "at least", f.Bar.Least
	if v != nil {
		by = *v / f.Value
	}
	if v == nil || f.Bar.Most != nil && f.Value > *f.Bar.Most {
		say, v = "at most", f.Bar.Most
		by = f.Value / *v
	}
	return fmt.Sprintf("%s %s %s", say, format(q.form(f.Metric), measure.Figure{Metric: f.Metric, Value: *v}), f.Metric), by
}

// anchor returns the link anchor of a page's heading.
func anchor(title string) string {
	var b strings.Builder
	for _, r := range strings.ToLower(title) {
		switch {
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-':
			b.WriteRune(r)
		case r == ' ':
			b.WriteByte('-')
		}
	}
	return b.String()
}

// row is a line of a question's table.
type row struct {
	label string
	cells map[string]*measure.Figure // keyed by series, contender and metric
}

func cellKey(series, who string, m measure.Metric) string {
	return series + "\x00" + who + "\x00" + string(m)
}

// rows returns the lines of a question's tables, in the order of the figures.
func (t *tables) rows(q question, names ...string) (rows []row) {
	index := make(map[string]int)
	for _, table := range names {
		for i := range t.figures[table] {
			f := &t.figures[table][i]
			if q.only != nil && !q.only.MatchString(f.Case) {
				continue
			}
			label, series, who := f.Case, "", f.Contender
			if q.name != nil {
				label = q.name.FindStringSubmatch(table)[1] + ", " + label
			}
			if len(q.tables) > 1 && label == "" {
				label = table
			}
			if q.split != nil {
				if m := q.split.FindStringSubmatch(label); m != nil {
					label, series = m[q.split.SubexpIndex("row")], m[q.split.SubexpIndex("series")]
				}
			}
			if q.contenders {
				label, who = label+" | "+who, ""
			}
			n, there := index[label]
			if !there {
				n = len(rows)
				index[label] = n
				rows = append(rows, row{label, make(map[string]*measure.Figure)})
			}
			rows[n].cells[cellKey(series, who, f.Metric)] = f
		}
	}
	return rows
}

// writeTable writes a question's table in Markdown.
func (t *tables) writeTable(w *bytes.Buffer, q question) {
	columns := 1
	fmt.Fprintf(w, "\n| %s |", q.head)
	if q.contenders {
		w.WriteString(" |")
		columns++
	}
	for _, c := range q.columns {
		fmt.Fprintf(w, " %s |", c.head)
	}
	fmt.Fprintf(w, "\n|%s\n", strings.Repeat("---|", columns+len(q.columns)))
	last := ""
	for _, r := range t.rows(q, q.tables...) {
		label := r.label
		if q.some != nil && !q.some.MatchString(label) {
			continue
		}
		if is, who, ok := strings.Cut(label, " | "); ok && is == last {
			label = "| " + who
		} else if ok {
			last = is
		}
		var line strings.Builder
		empty := true
		for _, c := range q.columns {
			text := ""
			if f := r.cells[cellKey(c.series, c.who, c.metric)]; f != nil {
				text, empty = c.text(*f), false
			}
			fmt.Fprintf(&line, " %s |", text)
		}
		if !empty {
			fmt.Fprintf(w, "| %s |%s\n", label, line.String())
		}
	}
}

// text formats a figure for the table. A figure that misses its bar is bold.
func (c column) text(f measure.Figure) string {
	s := format(c.form, f)
	if f.Bar != nil && !f.Bar.Met {
		s = "**" + s + "**"
	}
	return s
}

// form returns the format of a metric in a question's table.
func (q question) form(m measure.Metric) string {
	for _, c := range q.columns {
		if c.metric == m {
			return c.form
		}
	}
	return ""
}

// format formats a value. form is one of:
//
//   - %: a percentage
//   - 3: three digits
//   - us: nanoseconds as microseconds
//   - f and a number: that number of decimals
//   - empty: the metric's own format
func format(form string, f measure.Figure) string {
	switch {
	case form == "%":
		return fmt.Sprintf("%.1f%%", 100*f.Value)
	case form == "us": // from ns
		return digits(f.Value / 1000)
	case form == "3":
		return digits(f.Value)
	case strings.HasPrefix(form, "f"):
		return fmt.Sprintf("%."+form[1:]+"f", f.Value)
	}
	return f.Metric.Format(f.Value)
}

// digits formats a number with three significant digits, or as an integer from 100.
func digits(v float64) string {
	if v == 0 {
		return "0"
	}
	behind := max(0, 2-int(math.Floor(math.Log10(math.Abs(v)))))
	return fmt.Sprintf("%.*f", behind, v)
}
