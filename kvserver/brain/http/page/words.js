// Numbers in words.

const count = (number) => number.toLocaleString("en-US");
const short = (number) => (number >= 99.95 || number === 0 ? number.toFixed(0) : number.toFixed(number < 1 ? 2 : 1));
const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const plural = (number, word, words = `${word}s`) => `${count(number)} ${number === 1 ? word : words}`;
const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

function scaled(number, step, units) {
  let unit = 0;
  while (number >= 1000 && unit < units.length - 1) {
    number /= step;
    unit += 1;
  }
  return `${number >= 100 || unit === 0 ? number.toFixed(0) : number.toPrecision(3)} ${units[unit]}`;
}

const bytes = (number) => scaled(number, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const bytesPerS = (number) => scaled(number, 1000, ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"]);
const perS = (number) => `${short(number)}/s`;

function duration(seconds) {
  const whole = Math.floor(seconds);
  const days = Math.floor(whole / 86400);
  const [hours, minutes] = [Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}
