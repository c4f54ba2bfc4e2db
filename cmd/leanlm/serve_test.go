package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"
)

// lines is a buffer for one writer and one reader.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// startServer starts leanlm serve. stop interrupts the server, and returns the exit status and what was written to standard error.
func startServer(t *testing.T, args ...string) (url string, stop func() (int, string)) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var out lines
	done := make(chan int, 1)
	go func() {
		done <- run(ctx, append([]string{"serve", "-port", "0"}, args...), streams{strings.NewReader(""), io.Discard, &out})
	}()
	ended := -1
	stop = sync.OnceValues(func() (int, string) {
		cancel()
		if ended < 0 {
			ended = <-done
		}
		return ended, out.String()
	})
	t.Cleanup(func() { stop() })
	at := regexp.MustCompile(`serving .* at (https?://\S+)\n`)
	for begin := time.Now(); ; time.Sleep(time.Millisecond) {
		if m := at.FindStringSubmatch(out.String()); m != nil {
			return m[1], stop
		}
		select {
		case ended = <-done:
			t.Fatalf("status %d: %s", ended, out.String())
		default:
		}
		if time.Since(begin) > time.Minute {
			t.Fatalf("the server does not start: %s", out.String())
		}
	}
}

// writeCertificate writes a certificate for 127.0.0.1, and the key, to files.
func writeCertificate(t *testing.T) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	of := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, of, of, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	pkcs, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, kind string, data []byte) string {
		name = filepath.Join(dir, name)
		data = pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data})
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
		pool.AppendCertsFromPEM(data)
		return name
	}
	pool = x509.NewCertPool()
	return write("cert.pem", "CERTIFICATE", der), write("key.pem", "PRIVATE KEY", pkcs), pool
}

// TestServe: the command answers as leanlm generate does, over HTTP and HTTPS, and ends with an interrupt.
func TestServe(t *testing.T) {
	code, want, errs := leanlm(t, "", "generate", "-p", "Once upon a time", "-n", "8", "-temp", "0")
	if code != 0 {
		t.Fatal(errs)
	}
	cert, key, pool := writeCertificate(t)
	keys := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(keys, []byte("one\n\n two \n"), 0o600); err != nil {
		t.Fatal(err)
	}
	system := filepath.Join(t.TempDir(), "system")
	if err := os.WriteFile(system, []byte("Once upon a time there was a king who had three daughters and a ship"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"-invariant", "-pin", system, "-c", "256", "-cache-tokens", "512", "-swap", t.TempDir(), "-swap-size", "5"}, {"-ssl-cert-file", cert, "-ssl-key-file", key, "-api-key-file", keys, "-alias", "story"}} {
		url, stop := startServer(t, args...)
		client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
		q, err := http.NewRequest("POST", url+"/v1/completions", strings.NewReader(`{"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}`))
		if err != nil {
			t.Fatal(err)
		}
		q.Header.Set("Content-Type", "application/json")
		q.Header.Set("Authorization", "Bearer two")
		a, err := client.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		var answer struct {
			Model   string
			Choices []struct{ Text string }
		}
		err = json.NewDecoder(a.Body).Decode(&answer)
		a.Body.Close()
		if name := map[bool]string{true: "tiny", false: "story"}[args[0] == "-invariant"]; err != nil || answer.Model != name || len(answer.Choices) != 1 || answer.Choices[0].Text != strings.TrimSuffix(want, "\n") {
			t.Errorf("%v: %+v, %v, want %q", args, answer, err, want)
		}
		client.CloseIdleConnections()
		if status, out := stop(); status != 0 || !strings.Contains(out, "path=/v1/completions status=200") || strings.Contains(out, "Once upon") {
			t.Errorf("status %d: %s", status, out)
		}
	}
}

// TestServeConnections: connections beyond the bound wait.
func TestServeConnections(t *testing.T) {
	url, stop := startServer(t, "-connections", "1", "-quiet")
	first, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	second, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	ask := func(c net.Conn, wait time.Duration) error {
		if _, err := io.WriteString(c, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
			return err
		}
		if err := c.SetReadDeadline(time.Now().Add(wait)); err != nil {
			return err
		}
		_, err := c.Read(make([]byte, 1))
		return err
	}
	if err := ask(first, time.Minute); err != nil {
		t.Error(err)
	}
	if err := ask(second, 20*time.Millisecond); err == nil {
		t.Error("a second connection is answered")
	}
	first.Close()
	if err := second.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	if _, err := second.Read(make([]byte, 1)); err != nil {
		t.Error(err)
	}
	second.Close()
	if status, out := stop(); status != 0 {
		t.Errorf("status %d: %s", status, out)
	}
}

// TestServeFlags: wrong flags are named before a model is opened.
func TestServeFlags(t *testing.T) {
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	_, port, _ := net.SplitHostPort(taken.Addr().String())
	for _, c := range []struct {
		args   []string
		status int
		text   string
	}{
		{[]string{"-port", "65536"}, exitUsage, "-port is 65536"},
		{[]string{"-queue", "0"}, exitUsage, "-queue is 0"},
		{[]string{"-most-choices", "0"}, exitUsage, "-most-choices is 0"},
		{[]string{"-connections", "0"}, exitUsage, "-connections is 0"},
		{[]string{"-timeout", "0s"}, exitUsage, "-timeout is 0s"},
		{[]string{"-invariant", "-device", "gpu"}, exitUsage, "-invariant with -device gpu"},
		{[]string{"-swap-size", "0"}, exitUsage, "-swap-size is 0"},
		{[]string{"-pin", "/nowhere"}, exitError, "-pin: open /nowhere"},
		{[]string{"-pin", empty}, exitError, "-pin " + empty + " (-cache-tokens makes the cache larger): decoder: Pin: 1 tokens"},
		{[]string{"-swap", empty}, exitError, "Options.Swap: "},
		{[]string{"-patience", "-1s"}, exitUsage, "-patience is -1s"},
		{[]string{"-quiet", "-log-prompts"}, exitUsage, "-log-prompts with -quiet"},
		{[]string{"-ssl-cert-file", "a"}, exitUsage, "one of -ssl-cert-file and -ssl-key-file is missing"},
		{[]string{"-ssl-cert-file", "a", "-ssl-key-file", "b"}, exitError, "open a"},
		{[]string{"-api-key-file", empty}, exitError, "has no key"},
		{[]string{"-api-key-file", ""}, exitUsage, "-api-key-file needs a file"},
		{[]string{"-api-key-file", "/nowhere"}, exitError, "-api-key-file: open /nowhere"},
		{[]string{"-port", port}, exitError, "address already in use"},
	} {
		var errs bytes.Buffer
		if status := run(context.Background(), append([]string{"serve"}, c.args...), streams{strings.NewReader(""), io.Discard, &errs}); status != c.status || !strings.Contains(errs.String(), c.text) {
			t.Errorf("%v: status %d, %s", c.args, status, errs.String())
		}
	}
}
