package measure

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// answerTime is the longest that a worker may take for an answer: some load
// models, and some work through thousands of tokens.
const answerTime = 15 * time.Minute

// Worker is another process that computes when it is asked to, so that programs
// of other languages can take turns with ours. A question is a line of words on
// its standard input, and its answer a line on its standard output:
//
//	ok WORD ...
//	error TEXT
//
// It says ok once by itself when it is ready, and ends when its input does.
type Worker struct {
	command *exec.Cmd
	in      io.WriteCloser
	lines   chan string // closed when there are no more
	Stderr  tail
	Hello   []string // the words of its first ok
	// Patience is the longest that it may take for an answer; 0: a quarter of an hour.
	Patience time.Duration
	// Gone says that it gives no more answers: it has ended, or was silent for too long and is ended.
	Gone    bool
	closing sync.Once
	end     error
}

// StartWorker starts python on a program with arguments.
func StartWorker(python, program string, args ...string) (*Worker, error) {
	return Start(exec.Command(python, append([]string{"-u", "-c", program}, args...)...))
}

// Start starts a command. An interrupt from the terminal does not reach it, nor what it starts: a measurement that is interrupted
// finishes the shape at hand, with all who take part. The worker ends when we do, since its input does.
func Start(c *exec.Cmd) (*Worker, error) {
	w := &Worker{command: c, lines: make(chan string)}
	apart(c)
	c.Stderr = &w.Stderr
	// What a worker started in turn may hold the pipes: they are not waited for long.
	c.WaitDelay = time.Second
	in, err := c.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := c.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	w.in = in
	go func() {
		defer close(w.lines)
		for s := bufio.NewScanner(out); s.Scan(); {
			w.lines <- s.Text()
		}
	}()
	if w.Hello, err = w.answer(); err != nil {
		return nil, errors.Join(err, w.Close())
	}
	return w, nil
}

// Again starts the program of a worker that is gone once more. It knows nothing of what the one before was told.
func (w *Worker) Again() (*Worker, error) {
	w.Close() // why it is gone was said
	old := w.command
	c := exec.Command(old.Path)
	c.Args, c.Env, c.Dir = old.Args, old.Env, old.Dir
	next, err := Start(c)
	if err != nil {
		return nil, err
	}
	next.Patience = w.Patience
	return next, nil
}

// TorchSettle is longer than PyTorch's threads spin when they have no work.
const TorchSettle = 30 * time.Millisecond

// Steps is the Run of a contender in the worker: a question whose last word is the number of steps, and whose answer begins
// with the time of all.
func (w *Worker) Steps(format string, args ...any) func(n int) (time.Duration, error) {
	return func(n int) (time.Duration, error) {
		t, _, err := w.Seconds(1, format+" %d", append(slices.Clone(args), n)...)
		if err != nil {
			return 0, err
		}
		return t[0], nil
	}
}

// Ask sends a question and returns the words of its answer.
func (w *Worker) Ask(format string, args ...any) ([]string, error) {
	question := fmt.Sprintf(format, args...)
	if w.Gone {
		return nil, fmt.Errorf("%q: the worker is gone", question)
	}
	if _, err := io.WriteString(w.in, question+"\n"); err != nil {
		w.Gone = true
		return nil, fmt.Errorf("%q: %w%s", question, err, w.Stderr.Text())
	}
	words, err := w.answer()
	if err != nil {
		return nil, fmt.Errorf("%q: %w", question, err)
	}
	return words, nil
}

func (w *Worker) answer() ([]string, error) {
	patience := w.Patience
	if patience == 0 {
		patience = answerTime
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case line, more := <-w.lines:
		words := strings.Fields(line)
		switch {
		case !more:
			w.Gone = true
			w.Close() // then all that it had to say is there
			return nil, fmt.Errorf("the worker has ended%s", w.Stderr.Text())
		case len(words) == 0 || words[0] != "ok":
			return nil, fmt.Errorf("the worker says %q%s", line, w.Stderr.Text())
		}
		return words[1:], nil
	case <-timer.C:
		// It may still answer, when nobody knows any more what.
		w.Gone = true
		w.command.Process.Kill()
		w.Close()
		return nil, fmt.Errorf("the worker is silent for %v%s", patience, w.Stderr.Text())
	}
}

// Seconds asks a question whose answer is that many numbers of seconds, and
// perhaps more words.
func (w *Worker) Seconds(count int, format string, args ...any) (times []time.Duration, rest []string, err error) {
	words, err := w.Ask(format, args...)
	if err != nil {
		return nil, nil, err
	}
	if len(words) < count {
		return nil, nil, fmt.Errorf("the worker says %q, and %d times are needed", words, count)
	}
	for _, s := range words[:count] {
		f, err := strconv.ParseFloat(s, 64)
		if err != nil {
			return nil, nil, fmt.Errorf("the worker says %q: %w", words, err)
		}
		times = append(times, time.Duration(f*float64(time.Second)))
	}
	return times, words[count:], nil
}

// Close ends the worker: by itself, or after some seconds by force. Closing
// again gives the same error.
func (w *Worker) Close() error {
	w.closing.Do(func() {
		w.in.Close()
		force := time.AfterFunc(5*time.Second, func() { w.command.Process.Kill() })
		defer force.Stop()
		for range w.lines {
			// Nobody waits for these answers any more; its last ones must not block it.
		}
		if err := w.command.Wait(); err != nil {
			w.end = fmt.Errorf("worker: %w", err)
		}
	})
	return w.end
}

// tail keeps the end of what is written to it.
type tail struct {
	mu   sync.Mutex
	data []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.data = append(t.data, p...)
	if over := len(t.data) - 4000; over > 0 {
		t.data = t.data[over:]
	}
	return len(p), nil
}

// Text is the end of an error message, with what was written.
func (t *tail) Text() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if s := bytes.TrimSpace(t.data); len(s) > 0 {
		return ":\n" + string(s)
	}
	return ""
}
