package report

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"gorgonia.org/leanattention/cmd/leanbench/measure"
)

// drawThreads draws the speed over the number of threads from reports that measured several numbers of
// threads.
func drawThreads(flags *flag.FlagSet) func(stdout, stderr io.Writer) error {
	from := flags.String("from", "", "`file` that e2e -threads or cpu -prompts -threads wrote with -json")
	to := flags.String("to", "", "`folder` to write a picture to of each case, as SVG")
	only := flags.String("only", "", "draw only the tables and cases in whose names this `pattern` is found, as \"Steps.*b1\"")
	return func(stdout, stderr io.Writer) error {
		if *from == "" || *to == "" {
			return errors.New("-from and -to are needed")
		}
		pattern, err := regexp.Compile(*only)
		if err != nil {
			return fmt.Errorf("-only: %w", err)
		}
		r, err := measure.Load(*from)
		if err != nil {
			return err
		}
		pictures, err := threadPictures(r, pattern)
		if err != nil {
			return fmt.Errorf("%s: %w", *from, err)
		}
		for _, p := range pictures {
			name := filepath.Join(*to, p.name+".svg")
			if err := os.WriteFile(name, p.svg, 0o666); err != nil {
				return err
			}
			fmt.Fprintln(stdout, name)
		}
		return nil
	}
}

// threadPicture is the picture of one case over the number of threads.
type threadPicture struct {
	name string
	svg  []byte
}

var (
	ofThreads = regexp.MustCompile(`^(.*), (\d+) threads$`)
	unfit     = regexp.MustCompile(`[^a-z0-9.]+`) // characters that a file name may not have
)

// threadPictures draws the speed of all contenders in each case, from tables whose names differ in the number
// of threads. Two kinds of lines are dashed: peers, and linear scaling of the first contender from its fewest
// threads.
func threadPictures(r *measure.Report, only *regexp.Regexp) (pictures []threadPicture, err error) {
	t := newTables()
	var questions []question
	for _, f := range r.Figures {
		m := ofThreads.FindStringSubmatch(f.Table)
		if m == nil || !(f.Value > 0) || !slices.Contains([]measure.Metric{measure.Tokens, measure.Prompt, measure.Products}, f.Metric) {
			continue
		}
		title := m[1] + ": " + f.Case
		if !only.MatchString(title) {
			continue
		}
		i := slices.IndexFunc(questions, func(q question) bool { return q.title == title })
		if i < 0 {
			i = len(questions)
			questions = append(questions, question{
				id: strings.Trim(unfit.ReplaceAllString(strings.ToLower(title), "-"), "-"), title: title, tables: []string{title},
				picture: picture{kind: "lines", x: "threads", y: string(f.Metric), logX: true, logY: true, ticks: true},
			})
		}
		p := &questions[i].picture
		if !slices.ContainsFunc(p.series, func(c column) bool { return c.who == f.Contender }) {
			p.series = append(p.series, column{head: f.Contender, who: f.Contender, metric: f.Metric, dashed: !strings.HasPrefix(f.Contender, "lean")})
		}
		f.Table, f.Case = title, m[2]
		t.figures[title] = append(t.figures[title], f)
	}
	if len(questions) == 0 {
		return nil, errors.New("there is no table of several numbers of threads to draw")
	}
	for _, q := range questions {
		if err := t.addEven(&q); err != nil {
			return nil, err
		}
		svg, err := t.draw(q)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", q.title, err)
		}
		pictures = append(pictures, threadPicture{q.id, svg})
	}
	return pictures, nil
}

// addEven adds the linear scaling of a question's first contender as a series.
func (t *tables) addEven(q *question) error {
	const even = "as many times that of the first"
	first, per := q.picture.series[0], 0.0
	least := 0
	var all []measure.Figure
	for _, f := range t.figures[q.title] {
		n, err := strconv.Atoi(f.Case)
		if err != nil {
			return err
		}
		if f.Contender != first.who {
			continue
		}
		if least == 0 || n < least {
			least, per = n, f.Value/float64(n)
		}
		all = append(all, f)
	}
	if len(all) < 2 {
		return fmt.Errorf("%s: there is one number of threads, and nothing to draw over it", q.title)
	}
	for _, f := range all {
		n, _ := strconv.Atoi(f.Case)
		f.Contender, f.Value = even, per*float64(n)
		t.figures[q.title] = append(t.figures[q.title], f)
	}
	q.picture.series = append(q.picture.series, column{head: even, who: even, metric: first.metric, dashed: true, tint: len(palette)})
	return nil
}
